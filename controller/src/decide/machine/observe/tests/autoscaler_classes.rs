//! Autoscaler classes: the component that scales a Revision, and the annotations that then have an effect.

use super::*;

fn annotated(cluster: &mut FakeApiServer, pairs: &[(&str, &str)]) {
    with_image(cluster, "hello:v1", pairs);
}

fn with_image(cluster: &mut FakeApiServer, image: &str, pairs: &[(&str, &str)]) {
    let mut template = template(image, 1);
    for (name, value) in pairs {
        template["metadata"]["annotations"][format!("autoscaling.knative.dev/{name}")] =
            json!(value);
    }
    cluster.user(ResourceKind::KnativeService, "hello", json!({"template": template}));
}

fn deployment(cluster: &FakeApiServer) -> NamespacedName {
    let own = name("hello-00001-deployment");
    assert!(cluster.objects.contains_key(&(ResourceKind::Deployment, own.clone())));
    own
}

fn pods(cluster: &FakeApiServer) -> Vec<NamespacedName> {
    let all = cluster.objects.keys();
    let all = all.filter(|(resource, it)| *resource == ResourceKind::Pod && it.namespace == SPACE);
    all.map(|(_, it)| it.clone()).collect()
}

/// Reports this number of pods as ready, as the kubelet and Endpoints do.
fn confirm(cluster: &mut FakeApiServer, count: usize) {
    for own in pods(cluster).into_iter().take(count) {
        let mut object = cluster.objects[&(ResourceKind::Pod, own.clone())].clone();
        object["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
        cluster.objects.insert((ResourceKind::Pod, own.clone()), object.clone());
        cluster.step(ControllerEvent::ObjectObserved(
            ResourceKind::Pod,
            own,
            Some(Box::new(object)),
        ));
    }
}

fn horizontal() -> (ResourceKind, NamespacedName) {
    (ResourceKind::HorizontalPodAutoscaler, name("hello-00001"))
}

#[test]
fn kubernetes_scales_a_revision_of_its_class_and_nothing_of_ours_does() {
    let mut cluster = FakeApiServer::new();
    let asked = [("class", "hpa.autoscaling.knative.dev"), ("metric", "cpu"), ("target", "70")];
    annotated(&mut cluster, &[&asked[..], &[("min-scale", "2"), ("max-scale", "5")]].concat());
    let spec = &cluster.objects[&horizontal()]["spec"];
    assert_eq!((&spec["minReplicas"], &spec["maxReplicas"]), (&json!(2), &json!(5)));
    let owner = &cluster.objects[&horizontal()]["metadata"]["ownerReferences"][0];
    let autoscaler = cluster.object(ResourceKind::PodAutoscaler, "hello-00001");
    assert_eq!(
        (&owner["kind"], &owner["uid"]),
        (&json!("PodAutoscaler"), &autoscaler["metadata"]["uid"])
    );
    assert_eq!(pods_wanted(&cluster), &json!(2), "it begins with the fewest");
    let policy = &cluster.table().revisions[&name("hello-00001")].policy;
    assert_eq!(policy, &None, "our autoscaler knows nothing of it");
    cluster.ready();
    confirm(&mut cluster, 2);
    // Kubernetes scales, so a decision of Rouse's autoscaler has no effect.
    let own = deployment(&cluster);
    for event in cluster.scale(&own, 4, &[]) {
        cluster.step(event);
    }
    cluster.ready();
    cluster.decide("hello-00001", 0);
    assert_eq!((pods_wanted(&cluster), pods(&cluster).len()), (&json!(4), 4));
    let status = &cluster.object(ResourceKind::PodAutoscaler, "hello-00001")["status"];
    assert_eq!((&status["desiredScale"], &status["actualScale"]), (&json!(4), &json!(4)));
    for which in ["Active", "Ready", "SKSReady", "ScaleTargetInitialized"] {
        let said = cluster.condition(ResourceKind::PodAutoscaler, "hello-00001", which);
        assert_eq!(said, "True : ", "{which}");
    }
    let path = &cluster.object(ResourceKind::ServerlessService, "hello-00001")["spec"]["mode"];
    assert_eq!(path, "Serve");
    assert_eq!(cluster.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    let gone = cluster.scale(&own, 2, &[]);
    for event in gone {
        cluster.step(event);
    }
    assert_eq!((pods_wanted(&cluster), pods(&cluster).len()), (&json!(2), 2));
}

#[test]
fn a_foreign_class_is_left_to_its_owner() {
    let mut cluster = FakeApiServer::new();
    annotated(&mut cluster, &[("class", "sloth.example.com")]);
    cluster.ready();
    assert!(!cluster.objects.contains_key(&horizontal()));
    let own = deployment(&cluster);
    for event in cluster.scale(&own, 3, &[]) {
        cluster.step(event);
    }
    cluster.ready();
    cluster.decide("hello-00001", 0);
    assert_eq!((pods_wanted(&cluster), pods(&cluster).len()), (&json!(3), 3));
    let autoscaler = cluster.object(ResourceKind::PodAutoscaler, "hello-00001");
    assert_eq!(autoscaler.get("status"), None, "its owner writes it");
}

#[test]
fn our_class_has_no_horizontal_autoscaler() {
    let mut cluster = FakeApiServer::new();
    annotated(&mut cluster, &[]);
    assert!(!cluster.objects.contains_key(&horizontal()));
    assert!(cluster.table().revisions[&name("hello-00001")].policy.is_some());
}

#[test]
fn a_revision_reports_an_annotation_that_a_config_map_now_forbids() {
    let mut cluster = FakeApiServer::new();
    annotated(&mut cluster, &[("min-scale", "3"), ("max-scale", "10"), ("target", "10")]);
    let said = |cluster: &FakeApiServer| {
        cluster.condition(ResourceKind::Revision, "hello-00001", "AutoscalingAnnotationsValid")
    };
    assert_eq!(said(&cluster), " : ");
    cluster.config("config-autoscaler", json!({"max-scale-limit": "5", "max-scale": "5"}));
    let bounds = |cluster: &FakeApiServer| {
        let policy = cluster.table().revisions[&name("hello-00001")].policy.clone();
        let policy = policy.expect("ours");
        (policy.min_scale, policy.max_scale, policy.target_total)
    };
    assert_eq!(bounds(&cluster), (3, 5, 10.0));
    assert_eq!(
        said(&cluster),
        "False NotAllowed: Not allowed by config-autoscaler, and without effect: expected 1 <= 10 <= 5: \
         metadata.annotations.autoscaling.knative.dev/max-scale"
    );
    cluster.config("config-autoscaler", json!({}));
    assert_eq!((bounds(&cluster), said(&cluster)), ((3, 10, 10.0), "True : ".to_owned()));
}

/// Source of the rule: knative/serving `pkg/reconciler/revision/resources/pa.go`.
#[test]
fn a_revision_whose_pods_all_crash_counts_as_unreachable() {
    let mut cluster = FakeApiServer::new();
    annotated(&mut cluster, &[("min-scale", "2")]);
    cluster.ready();
    let reachable = |cluster: &FakeApiServer| {
        let autoscaler = cluster.object(ResourceKind::PodAutoscaler, "hello-00001");
        let said = autoscaler["spec"]["reachability"].clone();
        (cluster.table().revisions[&name("hello-00001")].reachable, said)
    };
    assert_eq!(reachable(&cluster), (true, json!("Reachable")));
    let fare = |cluster: &mut FakeApiServer, status: Value| {
        for own in pods(cluster) {
            let mut object = cluster.objects[&(ResourceKind::Pod, own.clone())].clone();
            object["status"]["containerStatuses"] = json!([status]);
            cluster.objects.insert((ResourceKind::Pod, own.clone()), object.clone());
            cluster.step(ControllerEvent::ObjectObserved(
                ResourceKind::Pod,
                own,
                Some(Box::new(object)),
            ));
        }
    };
    let crashed = json!({
        "name": "user-container", "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 1}},
    });
    fare(&mut cluster, crashed);
    assert_eq!(reachable(&cluster), (false, json!("Unreachable")));
    fare(&mut cluster, json!({"name": "user-container", "state": {"running": {}}}));
    assert_eq!(reachable(&cluster), (true, json!("Reachable")), "one may be mended");
}

#[test]
fn with_a_least_number_ready_means_what_the_kubelets_say() {
    let mut cluster = FakeApiServer::new();
    annotated(&mut cluster, &[("min-scale", "3")]);
    cluster.ready();
    let said =
        |cluster: &FakeApiServer| cluster.condition(ResourceKind::KnativeService, "hello", "Ready");
    let waits = said(&cluster);
    assert!(waits.starts_with("Unknown"), "{waits}");
    confirm(&mut cluster, 2);
    assert_eq!(said(&cluster), waits, "two of three");
    confirm(&mut cluster, 3);
    assert_eq!(said(&cluster), "True : ");
}

/// Readers of the Kubernetes objects see every pod of the new Revision ready before the old one loses its traffic.
#[test]
fn with_a_least_number_the_old_revision_goes_last() {
    let mut cluster = FakeApiServer::new();
    annotated(&mut cluster, &[("min-scale", "2")]);
    cluster.ready();
    confirm(&mut cluster, 2);
    with_image(&mut cluster, "hello:v2", &[("min-scale", "2")]);
    // Agents report at once that the new pods listen; kubelets report them one by one.
    cluster.ready();
    let serves = |cluster: &FakeApiServer| {
        let table = cluster.table();
        let target = table.services[&name("hello")].targets[0].revision.name.clone();
        let old = table.revisions[&name("hello-00001")].reachable;
        (target, old, pods_wanted(cluster).clone())
    };
    for ready in [2, 3] {
        confirm(&mut cluster, ready);
        assert_eq!(serves(&cluster), ("hello-00001".into(), true, json!(2)), "{ready} of 4");
    }
    confirm(&mut cluster, 4);
    assert_eq!(serves(&cluster), ("hello-00002".into(), false, json!(2)));
}

#[test]
fn a_route_is_ready_once_every_reporting_activator_routes_it() {
    let mut cluster = FakeApiServer::new();
    let who = |name: &str| ComponentReplica {
        role: ComponentRole::Activator,
        name: name.into(),
        node: "n1".into(),
    };
    // Two report their routed services, one is of an earlier release without that, and one has not named all services.
    for (stream, name) in [(1, "one"), (2, "two"), (3, "earlier"), (4, "begins")] {
        cluster.step(ControllerEvent::ReportStreamBegin(who(name), stream));
        if name != "earlier" {
            cluster.step(ControllerEvent::RoutedServicesBegin(who(name), stream));
        }
        if name != "begins" {
            cluster.step(ControllerEvent::ReportStreamSynced(who(name), stream));
        }
    }
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let said =
        |cluster: &FakeApiServer| cluster.condition(ResourceKind::Route, "hello", "IngressReady");
    let waits = "Unknown IngressNotConfigured: Ingress has not yet been reconciled.";
    assert_eq!(said(&cluster), waits);
    assert_eq!(cluster.table().services[&name("hello")].targets.len(), 1, "it is in the table");
    cluster.step(ControllerEvent::ServiceRouted(who("one"), 1, name("hello"), true));
    assert_eq!(said(&cluster), waits, "the other one does not yet");
    cluster.step(ControllerEvent::ServiceRouted(who("two"), 2, name("hello"), true));
    assert_eq!(said(&cluster), "True : ");
    assert_eq!(cluster.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    // A ready Route stays ready when an activator's stream begins again and has not named anything yet.
    cluster.step(ControllerEvent::ReportStreamBegin(who("two"), 5));
    cluster.step(ControllerEvent::RoutedServicesBegin(who("two"), 5));
    cluster.step(ControllerEvent::ReportStreamSynced(who("two"), 5));
    cluster.step(ControllerEvent::ObjectObserved(
        ResourceKind::Route,
        name("hello"),
        Some(Box::new(cluster.object(ResourceKind::Route, "hello").clone())),
    ));
    assert_eq!(said(&cluster), "True : ");
}

#[test]
fn decisions_are_reported_with_their_inputs() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    let told = |cluster: &FakeApiServer| {
        [ResourceKind::PodAutoscaler, ResourceKind::Revision].map(|resource| {
            let status = &cluster.object(resource, "hello-00001")["status"];
            status["annotations"]["rouse.dev/decision"].as_str().map(str::to_owned)
        })
    };
    assert_eq!(told(&cluster), [None, None], "nothing is decided of what sleeps");
    cluster.decide("hello-00001", 3);
    let line = "3 pods, straight to pods: load 0.00 in the stable window, 0.00 in the panic window; \
                target 70.00 a pod; 0 ready; excess burst capacity 0";
    let both = |line: &str| [Some(line.to_owned()), Some(line.to_owned())];
    assert_eq!(told(&cluster), both(line));
    // The same decision with other figures causes no write.
    let writes = cluster.writes;
    let again = ScaleDecision { stable_load: 5.0, ..decision("hello-00001", 3) };
    cluster.step(ControllerEvent::DecisionReceived(again));
    assert_eq!((cluster.writes, told(&cluster)), (writes, both(line)));
    cluster.step(ControllerEvent::DecisionWithdrawn(name("hello-00001")));
    assert_eq!(told(&cluster), [None, None]);
}
