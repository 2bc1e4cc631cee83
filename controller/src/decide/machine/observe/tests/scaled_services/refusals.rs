//! Services that cannot let a workload sleep.

use super::*;

/// Returns a cluster with the workload `web` of three ready pods.
fn with_workload() -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 3));
    api_server.make_pods_ready();
    api_server
}

/// Stores a pod with the label `app=web` and this controller, if any.
fn add_pod(api_server: &mut FakeApiServer, pod: &str, owner: Option<&str>) {
    let owners =
        owner.map(|kind| json!([{"kind": kind, "name": "x", "uid": "x", "controller": true}]));
    let object = json!({
        "metadata": {
            "name": pod, "namespace": NAMESPACE, "uid": format!("uid-of-{pod}"),
            "labels": {"app": "web"}, "ownerReferences": owners,
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "app"}]},
        "status": {"phase": "Running", "podIP": "10.1.3.3"},
    });
    api_server.objects.insert((ResourceKind::Pod, name(pod)), object.clone());
    let (resource, object) = (ResourceKind::Pod, Some(Box::new(object)));
    api_server.step(ControllerEvent::ObjectObserved { resource, name: name(pod), object });
}

/// Checks that the Service is refused for this reason, by its condition and one Event, and that the workload is left
/// alone.
fn assert_refused(api_server: &mut FakeApiServer, reason: &str) {
    api_server.decide("web", 0);
    advance(api_server, 301);
    assert_eq!(ready(api_server), format!("False {reason}"));
    assert_eq!(events(api_server), [reason]);
    assert!(
        api_server.object_events[0].is_warning && api_server.object_events[0].name == name("web")
    );
    let service = api_server.object(ResourceKind::Service, "web");
    assert_eq!(service["metadata"]["uid"], api_server.object_events[0].uid.as_str());
    assert!(api_server.table().services.is_empty() && api_server.table().pods.is_empty());
    assert_eq!(api_server.replicas_writes, [0_u64; 0]);
    assert!(!leads_to_activators(api_server));
}

/// A refusal ends as soon as its cause is gone.
fn assert_accepted(api_server: &mut FakeApiServer) {
    assert!(port_entry(api_server, 80).is_some());
    fall_asleep(api_server);
    assert_eq!(replicas(api_server, DEPLOYMENT), 0);
    assert_eq!(events(api_server).len(), 1);
}

#[test]
fn a_service_that_cannot_sleep_says_why() {
    let with = |field: &str, value: Value| {
        let mut spec = service_spec("web");
        spec[field] = value;
        spec
    };
    let annotated = |key: &str, value: &str| {
        let mut annotations = sleeps();
        annotations[key] = json!(value);
        annotations
    };
    let mut headless = with("clusterIP", json!("None"));
    headless["clusterIPs"] = json!(["None"]);
    let udp = json!([{"name": "dns", "port": 53, "protocol": "UDP"}]);
    for (annotations, spec, reason) in [
        (sleeps(), headless, "Headless"),
        (sleeps(), with("type", json!("ExternalName")), "ExternalName"),
        (sleeps(), with("selector", Value::Null), "NoSelector"),
        (sleeps(), with("selector", json!({"app": "other"})), "NoWorkload"),
        (sleeps(), with("internalTrafficPolicy", json!("Local")), "InternalTrafficPolicyLocal"),
        (sleeps(), with("ports", udp), "NoTcpPort"),
        (annotated("rouse.dev/scale-to-zero", "yes"), service_spec("web"), "InvalidAnnotation"),
        (annotated("rouse.dev/protocol", "smtp"), service_spec("web"), "InvalidAnnotation"),
        (
            annotated("autoscaling.knative.dev/class", "hpa.autoscaling.knative.dev"),
            service_spec("web"),
            "InvalidAnnotation",
        ),
    ] {
        let mut api_server = with_workload();
        apply_service(&mut api_server, "web", annotations, spec);
        assert_refused(&mut api_server, reason);
        apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
        assert_accepted(&mut api_server);
    }
}

#[test]
fn pods_on_the_network_of_their_node_cannot_be_told_apart() {
    let mut api_server = FakeApiServer::new();
    let mut spec = workload_spec("web", 3);
    spec["template"]["spec"]["hostNetwork"] = json!(true);
    api_server.apply_workload(DEPLOYMENT, "web", &spec);
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    assert_refused(&mut api_server, "HostNetwork");
    api_server.apply_workload(DEPLOYMENT, "web", &workload_spec("web", 3));
    assert_accepted(&mut api_server);
}

/// Each sleep would delete the volumes of all pods. A user may also ask for that while the workload sleeps.
#[test]
fn a_stateful_set_whose_volumes_would_be_deleted_stays_awake() {
    let policy = |when_scaled: &str| {
        let policy = json!({"whenDeleted": "Delete", "whenScaled": when_scaled});
        json!({"persistentVolumeClaimRetentionPolicy": policy})
    };
    let mut api_server = FakeApiServer::new();
    api_server.apply_workload(STATEFUL_SET, "web", &workload_spec("web", 3));
    api_server.make_pods_ready();
    api_server.apply_workload(STATEFUL_SET, "web", &policy("Delete"));
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    assert_refused(&mut api_server, "VolumesDeleted");
    let message = &api_server.object_events[0].message;
    assert!(message.contains("StatefulSet \"web\""), "{message}");
    api_server.apply_workload(STATEFUL_SET, "web", &policy("Retain"));
    fall_asleep(&mut api_server);
    assert_eq!(replicas(&api_server, STATEFUL_SET), 0);

    api_server.apply_workload(STATEFUL_SET, "web", &policy("Delete"));
    advance(&mut api_server, 6);
    assert_eq!(
        (replicas(&api_server, STATEFUL_SET), ready(&api_server)),
        (3, "False VolumesDeleted".into())
    );
    assert_eq!(record(&api_server, STATEFUL_SET), [None, None], "it is its user's again");
}

#[test]
fn several_workloads_of_one_service_are_named() {
    let mut api_server = with_workload();
    api_server.apply_workload(STATEFUL_SET, "db", &workload_spec("web", 1));
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    assert_refused(&mut api_server, "SeveralWorkloads");
    let message = &api_server.object_events[0].message;
    assert!(message.ends_with("StatefulSet \"db\", Deployment \"web\""), "{message}");
    api_server.delete_as_user(STATEFUL_SET, "db");
    assert_accepted(&mut api_server);
}

#[test]
fn a_pod_of_another_owner_is_named_too() {
    for (owner, named) in [(Some("DaemonSet"), "DaemonSet \"x\""), (None, "Pod \"alone\"")] {
        let mut api_server = with_workload();
        add_pod(&mut api_server, "alone", owner);
        apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
        assert_refused(&mut api_server, "SeveralWorkloads");
        let message = &api_server.object_events[0].message;
        assert!(message.ends_with(&format!("Deployment \"web\", {named}")), "{message}");
        api_server.delete_as_user(ResourceKind::Pod, "alone");
        assert_accepted(&mut api_server);
    }
}

/// A pod with copied labels, such as one for debugging, may be there for a moment.
#[test]
fn another_pod_ends_the_sleep_only_if_it_stays() {
    let mut api_server = asleep(DEPLOYMENT);
    add_pod(&mut api_server, "alone", None);
    assert!(port_entry(&api_server, 80).is_some() && leads_to_activators(&api_server));
    assert!(!api_server.table().pods.values().any(|it| it.name == "alone"));
    api_server.delete_as_user(ResourceKind::Pod, "alone");
    advance(&mut api_server, 6);
    assert_eq!((replicas(&api_server, DEPLOYMENT), events(&api_server).len()), (0, 0));
    add_pod(&mut api_server, "alone", None);
    advance(&mut api_server, 6);
    assert_eq!(
        (replicas(&api_server, DEPLOYMENT), events(&api_server)),
        (3, vec!["SeveralWorkloads"])
    );
    assert_eq!(record(&api_server, DEPLOYMENT), [None, None]);
    assert!(port_entry(&api_server, 80).is_none() && !leads_to_activators(&api_server));
    assert_eq!(ready(&api_server), "False SeveralWorkloads");
}

#[test]
fn the_older_one_of_two_services_keeps_the_workload() {
    let mut api_server = with_workload();
    apply_service(&mut api_server, "old", sleeps(), service_spec("web"));
    api_server.now = api_server.now.plus_ms(1000);
    apply_service(&mut api_server, "web", sleeps(), service_spec("web"));
    assert!(api_server.table().revisions.contains_key(&name("old")));
    assert_eq!(api_server.table().pods.len(), 3);
    advance(&mut api_server, 6);
    assert_eq!(
        (ready(&api_server), events(&api_server)),
        ("False WorkloadTaken".into(), vec!["WorkloadTaken"])
    );
    let message = &api_server.object_events[0].message;
    assert_eq!(message, "Deployment \"web\" is scaled by the older Service \"old\"");
    api_server.decide("old", 0);
    advance(&mut api_server, 301);
    assert_eq!(record(&api_server, DEPLOYMENT), recorded(0, 3));
    // The other one takes over, without any pod in between.
    api_server.delete_as_user(ResourceKind::Service, "old");
    assert!(port_entry(&api_server, 80).is_some());
    assert_eq!(api_server.table().revisions.keys().collect::<Vec<_>>(), [&name("web")]);
    assert_eq!((replicas(&api_server, DEPLOYMENT), api_server.user_pods().len()), (0, 0));
    api_server.decide("web", 3);
    assert_eq!(replicas(&api_server, DEPLOYMENT), 3);
}

/// At a start, Services are observed in any order.
#[test]
fn an_older_service_that_is_observed_later_takes_over_the_pods() {
    let mut api_server = with_workload();
    let mut later = service_spec("web");
    later["clusterIPs"] = json!(["10.96.9.2"]);
    apply_service(&mut api_server, "web", sleeps(), later);
    assert_eq!(api_server.table().pods.len(), 3);
    api_server.api_server_clock = Some(UnixMillis(1000));
    apply_service(&mut api_server, "old", sleeps(), service_spec("web"));
    let table = api_server.table();
    assert_eq!(table.revisions.keys().collect::<Vec<_>>(), [&name("old")]);
    assert_eq!(table.services.keys().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["old:80"]);
    let of_old = table.pods.values().filter(|it| it.revision == name("old"));
    assert_eq!((of_old.count(), table.pods.len()), (3, 3));
    api_server.report_all_ready();
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
}

#[test]
fn the_name_of_a_knative_service_is_taken() {
    let mut api_server = scaled(DEPLOYMENT);
    // The Route cannot have its placeholder, and says so.
    api_server.other_replica = None;
    api_server.apply_service("web", "web:v1", 0, Value::Null);
    assert_eq!(ready(&api_server), "False NameTaken");
    assert_eq!(events(&api_server), ["NameTaken"]);
    assert!(!api_server.table().revisions.contains_key(&name("web")));
    assert!(port_entry(&api_server, 80).is_none());
    api_server.delete_as_user(ResourceKind::KnativeService, "web");
    assert!(port_entry(&api_server, 80).is_some());
    assert_eq!(phases(&api_server), [RoutingPhase::Ready; 3]);
    assert_eq!(ready(&api_server), "True ");
}

#[test]
fn the_name_of_a_revision_is_taken() {
    let mut api_server = with_workload();
    apply_service(&mut api_server, "hello-00001", sleeps(), service_spec("web"));
    assert_eq!(api_server.table().pods.len(), 3);
    // The Revision cannot have its Service, and says so.
    api_server.other_replica = None;
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    assert_eq!(events(&api_server), ["NameTaken"]);
    let table = api_server.table();
    assert_eq!(table.revisions[&name("hello-00001")].service, "hello");
    assert_eq!(table.pods.len(), 0);
    let autoscaler = api_server.object(ResourceKind::PodAutoscaler, "hello-00001");
    assert_eq!(autoscaler["metadata"]["ownerReferences"][0]["kind"], "Revision");
}
