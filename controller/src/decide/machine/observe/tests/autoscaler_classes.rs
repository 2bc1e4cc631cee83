//! Autoscaler classes: the component that scales a Revision, and the annotations that then have an effect.

use common::wire::ScaleDecision;

use super::*;

fn apply_annotated(api_server: &mut FakeApiServer, pairs: &[(&str, &str)]) {
    apply_image(api_server, "hello:v1", pairs);
}

fn apply_image(api_server: &mut FakeApiServer, image: &str, pairs: &[(&str, &str)]) {
    let mut template = template(image, 1);
    for (name, value) in pairs {
        template["metadata"]["annotations"][format!("autoscaling.knative.dev/{name}")] =
            json!(value);
    }
    api_server.apply_as_user(ResourceKind::KnativeService, "hello", json!({"template": template}));
}

fn deployment(api_server: &FakeApiServer) -> NamespacedName {
    let object_name = name("hello-00001-deployment");
    assert!(api_server.objects.contains_key(&(ResourceKind::Deployment, object_name.clone())));
    object_name
}

fn pods(api_server: &FakeApiServer) -> Vec<NamespacedName> {
    let all = api_server.objects.keys();
    let all =
        all.filter(|(resource, it)| *resource == ResourceKind::Pod && it.namespace == NAMESPACE);
    all.map(|(_, it)| it.clone()).collect()
}

/// Reports this number of pods as ready, as the kubelet and Endpoints do.
fn report_kubelet_ready(api_server: &mut FakeApiServer, count: usize) {
    for object_name in pods(api_server).into_iter().take(count) {
        let mut object = api_server.objects[&(ResourceKind::Pod, object_name.clone())].clone();
        object["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
        api_server.objects.insert((ResourceKind::Pod, object_name.clone()), object.clone());
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: object_name,
            object: Some(Box::new(object)),
        });
    }
}

fn hpa_key() -> (ResourceKind, NamespacedName) {
    (ResourceKind::HorizontalPodAutoscaler, name("hello-00001"))
}

#[test]
fn a_revision_of_class_hpa_is_scaled_by_kubernetes_only() {
    let mut api_server = FakeApiServer::new();
    let annotations =
        [("class", "hpa.autoscaling.knative.dev"), ("metric", "cpu"), ("target", "70")];
    apply_annotated(
        &mut api_server,
        &[&annotations[..], &[("min-scale", "2"), ("max-scale", "5")]].concat(),
    );
    let spec = &api_server.objects[&hpa_key()]["spec"];
    assert_eq!((&spec["minReplicas"], &spec["maxReplicas"]), (&json!(2), &json!(5)));
    let owner = &api_server.objects[&hpa_key()]["metadata"]["ownerReferences"][0];
    let autoscaler = api_server.object(ResourceKind::PodAutoscaler, "hello-00001");
    assert_eq!(
        (&owner["kind"], &owner["uid"]),
        (&json!("PodAutoscaler"), &autoscaler["metadata"]["uid"])
    );
    assert_eq!(requested_replicas(&api_server), &json!(2), "it begins with the fewest");
    let policy = &api_server.table().revisions[&name("hello-00001")].policy;
    assert_eq!(policy, &None, "our autoscaler knows nothing of it");
    api_server.report_all_ready();
    report_kubelet_ready(&mut api_server, 2);
    // Kubernetes scales, so a decision of Rouse's autoscaler has no effect.
    let object_name = deployment(&api_server);
    for event in api_server.scale(&object_name, 4, &[]) {
        api_server.step(event);
    }
    api_server.report_all_ready();
    api_server.decide("hello-00001", 0);
    assert_eq!((requested_replicas(&api_server), pods(&api_server).len()), (&json!(4), 4));
    let status = &api_server.object(ResourceKind::PodAutoscaler, "hello-00001")["status"];
    assert_eq!((&status["desiredScale"], &status["actualScale"]), (&json!(4), &json!(4)));
    for condition_type in ["Active", "Ready", "SKSReady", "ScaleTargetInitialized"] {
        let condition =
            api_server.condition(ResourceKind::PodAutoscaler, "hello-00001", condition_type);
        assert_eq!(condition, "True : ", "{condition_type}");
    }
    let path = &api_server.object(ResourceKind::ServerlessService, "hello-00001")["spec"]["mode"];
    assert_eq!(path, "Serve");
    assert_eq!(api_server.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    let events = api_server.scale(&object_name, 2, &[]);
    for event in events {
        api_server.step(event);
    }
    assert_eq!((requested_replicas(&api_server), pods(&api_server).len()), (&json!(2), 2));
}

/// The watches of two kinds come in any order, at the creation and at the deletion.
#[test]
fn the_scale_of_a_deployment_comes_and_goes_with_its_revision() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[("class", "sloth.example.com")]);
    let object_name = deployment(&api_server);
    for event in api_server.scale(&object_name, 3, &[]) {
        api_server.step(event);
    }
    let autoscaler_scale = |machine: &ControllerStateMachine| {
        let scales = &machine.cluster().scaling.external_scales;
        scales.get(&name("hello-00001")).copied()
    };
    let mut late_machine = machine().loading();
    for event in observations_of_deployments_first(&api_server.objects) {
        late_machine.step(api_server.now, event);
    }
    late_machine.step(api_server.now, ControllerEvent::InitialListSynced);
    assert_eq!(autoscaler_scale(&late_machine), Some(3), "the Deployment came first");
    // Without pods, the Revision is forgotten as soon as it is deleted.
    for event in api_server.scale(&object_name, 0, &[]) {
        api_server.step(event);
    }
    assert_eq!(autoscaler_scale(&api_server.machine), Some(0));
    let revision = &api_server.machine.cluster().apps[&name("hello")].revisions[0];
    assert_eq!(revision.scaling.requested_scale, 0, "the change alone is planned");
    api_server.delete_as_user(ResourceKind::KnativeService, "hello");
    assert_eq!(api_server.machine.cluster().scaling.external_scales.len(), 0);
    assert_eq!(api_server.machine.early_deployments.len(), 0);
}

/// A Service that is deleted and made again has Revisions of the same names. Their watch may be behind.
#[test]
fn the_scale_of_a_new_deployment_waits_for_its_own_revision() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[("class", "sloth.example.com")]);
    let object_name = deployment(&api_server);
    let new_uid = "00000000-0000-4000-8000-00000000ffff";
    let mut revision = api_server.object(ResourceKind::Revision, "hello-00001").clone();
    revision["metadata"]["uid"] = json!(new_uid);
    let mut new_deployment = api_server.object(ResourceKind::Deployment, &object_name.name).clone();
    new_deployment["metadata"]["labels"][key::REVISION_UID] = json!(new_uid);
    new_deployment["spec"]["replicas"] = json!(5);
    let observed = |resource, name: &NamespacedName, object: Option<&Value>| {
        let object = object.cloned().map(Box::new);
        ControllerEvent::ObjectObserved { resource, name: name.clone(), object }
    };
    let revision_name = name("hello-00001");
    for is_deletion_observed in [false, true] {
        let mut follower = api_server.start_replica();
        let scale = |machine: &ControllerStateMachine| {
            machine.cluster().scaling.external_scales.get(&revision_name).copied()
        };
        let before = scale(&follower);
        let event = observed(ResourceKind::Deployment, &object_name, Some(&new_deployment));
        follower.step(api_server.now, event);
        assert_eq!(scale(&follower), before, "the known Revision is the earlier one");
        if is_deletion_observed {
            let event = observed(ResourceKind::Revision, &revision_name, None);
            follower.step(api_server.now, event);
        }
        let event = observed(ResourceKind::Revision, &revision_name, Some(&revision));
        follower.step(api_server.now, event);
        assert_eq!(scale(&follower), Some(5), "{is_deletion_observed}");
        assert_eq!(follower.early_deployments.len(), 0);
    }
}

#[test]
fn a_foreign_class_is_left_to_its_owner() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[("class", "sloth.example.com")]);
    api_server.report_all_ready();
    assert!(!api_server.objects.contains_key(&hpa_key()));
    let object_name = deployment(&api_server);
    for event in api_server.scale(&object_name, 3, &[]) {
        api_server.step(event);
    }
    api_server.report_all_ready();
    api_server.decide("hello-00001", 0);
    assert_eq!((requested_replicas(&api_server), pods(&api_server).len()), (&json!(3), 3));
    let autoscaler = api_server.object(ResourceKind::PodAutoscaler, "hello-00001");
    assert_eq!(autoscaler.get("status"), None, "its owner writes it");
}

/// Source of the rule: knative/serving `pkg/reconciler/gc/gc.go`, by which pods keep no Revision.
#[test]
fn an_old_revision_with_pods_is_collected_in_every_class() {
    let hpa = [("class", "hpa.autoscaling.knative.dev"), ("metric", "cpu"), ("target", "70")];
    for annotations in [&hpa[..], &[("class", "sloth.example.com")], &[("min-scale", "1")]] {
        let mut api_server = FakeApiServer::new();
        api_server.other_replica = None;
        let config_gc = json!({
            "min-non-active-revisions": "0",
            "retain-since-create-time": "1h",
            "retain-since-last-active-time": "1h",
        });
        api_server.set_config_map("config-gc", config_gc);
        for image in ["hello:v1", "hello:v2"] {
            apply_image(&mut api_server, image, annotations);
            api_server.report_all_ready();
            report_kubelet_ready(&mut api_server, 2);
            api_server.decide("hello-00001", 1);
        }
        assert_eq!(pods(&api_server).len(), 2, "{annotations:?}");
        api_server.now = api_server.now.plus_ms(2 * 3_600_000);
        api_server.step(ControllerEvent::Tick);
        let revisions = api_server.names(ResourceKind::Revision);
        assert_eq!(revisions, [name("hello-00002")], "{annotations:?}");
        assert_eq!(pods(&api_server).len(), 1, "{annotations:?}");
        assert_eq!(api_server.machine.cluster().apps[&name("hello")].revisions.len(), 1);
    }
}

/// A replica that only follows deletes nothing, so as the next leader it still knows what is to be deleted.
#[test]
fn a_follower_keeps_an_old_revision_until_it_is_deleted() {
    let mut api_server = FakeApiServer::new();
    api_server.other_replica = None;
    let config_gc = json!({
        "min-non-active-revisions": "0",
        "retain-since-create-time": "1h",
        "retain-since-last-active-time": "1h",
    });
    api_server.set_config_map("config-gc", config_gc);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.apply_service("hello", "hello:v2", 0, Value::Null);
    api_server.step(ControllerEvent::LeadershipChanged(false));
    api_server.now = api_server.now.plus_ms(2 * 3_600_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(api_server.machine.cluster().apps[&name("hello")].revisions.len(), 2);
    assert_eq!(api_server.names(ResourceKind::Revision).len(), 2);
    api_server.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(api_server.names(ResourceKind::Revision), [name("hello-00002")]);
}

#[test]
fn class_kpa_has_no_horizontal_pod_autoscaler() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[]);
    assert!(!api_server.objects.contains_key(&hpa_key()));
    assert!(api_server.table().revisions[&name("hello-00001")].policy.is_some());
}

#[test]
fn a_revision_reports_an_annotation_that_a_config_map_now_forbids() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[("min-scale", "3"), ("max-scale", "10"), ("target", "10")]);
    let condition = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::Revision, "hello-00001", "AutoscalingAnnotationsValid")
    };
    assert_eq!(condition(&api_server), " : ");
    api_server
        .set_config_map("config-autoscaler", json!({"max-scale-limit": "5", "max-scale": "5"}));
    let bounds = |api_server: &FakeApiServer| {
        let policy = api_server.table().revisions[&name("hello-00001")].policy.clone();
        let policy = policy.expect("ours");
        (policy.min_scale, policy.max_scale, policy.target_total)
    };
    assert_eq!(bounds(&api_server), (3, 5, 10.0));
    assert_eq!(
        condition(&api_server),
        "False NotAllowed: Not allowed by config-autoscaler, and without effect: expected 1 <= 10 <= 5: \
         metadata.annotations.autoscaling.knative.dev/max-scale"
    );
    api_server.set_config_map("config-autoscaler", json!({}));
    assert_eq!(
        (bounds(&api_server), condition(&api_server)),
        ((3, 10, 10.0), "True : ".to_owned())
    );
}

/// Source of the rule: knative/serving `pkg/reconciler/revision/resources/pa.go`.
#[test]
fn a_revision_whose_pods_all_crash_counts_as_unreachable() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[("min-scale", "2")]);
    api_server.report_all_ready();
    let reachable = |api_server: &FakeApiServer| {
        let autoscaler = api_server.object(ResourceKind::PodAutoscaler, "hello-00001");
        let reachability = autoscaler["spec"]["reachability"].clone();
        (api_server.table().revisions[&name("hello-00001")].reachable, reachability)
    };
    assert_eq!(reachable(&api_server), (true, json!("Reachable")));
    let set_container_status = |api_server: &mut FakeApiServer, status: Value| {
        for object_name in pods(api_server) {
            let mut object = api_server.objects[&(ResourceKind::Pod, object_name.clone())].clone();
            object["status"]["containerStatuses"] = json!([status]);
            api_server.objects.insert((ResourceKind::Pod, object_name.clone()), object.clone());
            api_server.step(ControllerEvent::ObjectObserved {
                resource: ResourceKind::Pod,
                name: object_name,
                object: Some(Box::new(object)),
            });
        }
    };
    let crashed = json!({
        "name": "user-container", "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 1}},
    });
    set_container_status(&mut api_server, crashed);
    assert_eq!(reachable(&api_server), (false, json!("Unreachable")));
    let running = json!({"name": "user-container", "state": {"running": {}}});
    set_container_status(&mut api_server, running);
    assert_eq!(reachable(&api_server), (true, json!("Reachable")), "one may be mended");
}

#[test]
fn min_scale_counts_pods_that_the_kubelet_reports_ready() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[("min-scale", "3")]);
    api_server.report_all_ready();
    let condition = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::KnativeService, "hello", "Ready")
    };
    let waits = condition(&api_server);
    assert!(waits.starts_with("Unknown"), "{waits}");
    report_kubelet_ready(&mut api_server, 2);
    assert_eq!(condition(&api_server), waits, "two of three");
    report_kubelet_ready(&mut api_server, 3);
    assert_eq!(condition(&api_server), "True : ");
}

/// Readers of the Kubernetes objects see every pod of the new Revision ready before the old one loses its traffic.
#[test]
fn with_min_scale_traffic_moves_once_all_new_pods_are_ready() {
    let mut api_server = FakeApiServer::new();
    apply_annotated(&mut api_server, &[("min-scale", "2")]);
    api_server.report_all_ready();
    report_kubelet_ready(&mut api_server, 2);
    apply_image(&mut api_server, "hello:v2", &[("min-scale", "2")]);
    // Agents report at once that the new pods listen; kubelets report them one by one.
    api_server.report_all_ready();
    let serves = |api_server: &FakeApiServer| {
        let table = api_server.table();
        let target = table.services[&name("hello")].targets[0].revision.name.clone();
        let old = table.revisions[&name("hello-00001")].reachable;
        (target, old, requested_replicas(api_server).clone())
    };
    for ready in [2, 3] {
        report_kubelet_ready(&mut api_server, ready);
        assert_eq!(serves(&api_server), ("hello-00001".into(), true, json!(2)), "{ready} of 4");
    }
    report_kubelet_ready(&mut api_server, 4);
    assert_eq!(serves(&api_server), ("hello-00002".into(), false, json!(2)));
}

#[test]
fn a_route_is_ready_once_every_reporting_activator_routes_it() {
    let mut api_server = FakeApiServer::new();
    let activator = |name: &str| ComponentReplica {
        role: ClientComponent::Activator,
        name: name.into(),
        node: "n1".into(),
    };
    // Two report their routed services, one is of an earlier release without that, and one has not named all services.
    for (stream, name) in [(1, "one"), (2, "two"), (3, "earlier"), (4, "begins")] {
        api_server.step(ControllerEvent::ReportStreamBegin { reporter: activator(name), stream });
        if name != "earlier" {
            api_server
                .step(ControllerEvent::RoutedServicesBegin { reporter: activator(name), stream });
        }
        if name != "begins" {
            api_server
                .step(ControllerEvent::ReportStreamSynced { reporter: activator(name), stream });
        }
    }
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let condition = |api_server: &FakeApiServer| {
        api_server.condition(ResourceKind::Route, "hello", "IngressReady")
    };
    let waits = "Unknown IngressNotConfigured: Ingress has not yet been reconciled.";
    assert_eq!(condition(&api_server), waits);
    assert_eq!(api_server.table().services[&name("hello")].targets.len(), 1, "it is in the table");
    api_server.step(ControllerEvent::ServiceRouted {
        reporter: activator("one"),
        stream: 1,
        service: name("hello"),
    });
    assert_eq!(condition(&api_server), waits, "the other one does not yet");
    api_server.step(ControllerEvent::ServiceRouted {
        reporter: activator("two"),
        stream: 2,
        service: name("hello"),
    });
    assert_eq!(condition(&api_server), "True : ");
    assert_eq!(api_server.condition(ResourceKind::KnativeService, "hello", "Ready"), "True : ");
    // A ready Route stays ready when an activator's stream begins again and has not named anything yet.
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: activator("two"), stream: 5 });
    api_server.step(ControllerEvent::RoutedServicesBegin { reporter: activator("two"), stream: 5 });
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: activator("two"), stream: 5 });
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Route,
        name: name("hello"),
        object: Some(Box::new(api_server.object(ResourceKind::Route, "hello").clone())),
    });
    assert_eq!(condition(&api_server), "True : ");
}

const AGENTS_AWAITED: &str =
    "Unknown IngressNotConfigured: Some nodes do not lead connections to its ClusterIPs yet.";

fn agent(node: &str) -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: node.into(), node: node.into() }
}

/// Begins the reports of an agent that names the services which await agents.
fn begin_agent_reports(api_server: &mut FakeApiServer, node: &str, stream: u64) {
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(node), stream });
    api_server.step(ControllerEvent::RoutedServicesBegin { reporter: agent(node), stream });
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: agent(node), stream });
}

/// Returns the condition of the Route, and true if its service awaits agents in the RouteTable.
fn ingress_and_wait(api_server: &FakeApiServer) -> (String, bool) {
    let condition = api_server.condition(ResourceKind::Route, "hello", "IngressReady");
    (condition, api_server.table().services[&name("hello")].awaits_agents)
}

#[test]
fn a_route_is_ready_once_every_reporting_agent_leads_connects_to_it() {
    let mut api_server = FakeApiServer::new();
    for (node, stream) in [("n1", 1), ("n2", 2)] {
        begin_agent_reports(&mut api_server, node, stream);
    }
    // An agent of an earlier release names no services.
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent("n3"), stream: 3 });
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: agent("n3"), stream: 3 });
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let waits = (AGENTS_AWAITED.to_owned(), true);
    assert_eq!(ingress_and_wait(&api_server), waits);
    let routed = |node: &str, stream| ControllerEvent::ServiceRouted {
        reporter: agent(node),
        stream,
        service: name("hello"),
    };
    api_server.step(routed("n1", 1));
    assert_eq!(ingress_and_wait(&api_server), waits, "the other one does not yet");
    api_server.step(routed("n2", 2));
    assert_eq!(ingress_and_wait(&api_server), ("True : ".to_owned(), false));
    // A ready Route waits for no agent that begins later.
    begin_agent_reports(&mut api_server, "n4", 4);
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Route,
        name: name("hello"),
        object: Some(Box::new(api_server.object(ResourceKind::Route, "hello").clone())),
    });
    assert_eq!(ingress_and_wait(&api_server), ("True : ".to_owned(), false));
}

#[test]
fn a_route_is_ready_although_an_agent_never_leads_connects_to_it() {
    let mut api_server = FakeApiServer::new();
    begin_agent_reports(&mut api_server, "n1", 1);
    let begin = api_server.now;
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    for (passed_ms, is_ready) in [(4_999, false), (5_499, true)] {
        api_server.now = begin.plus_ms(passed_ms);
        api_server.step(ControllerEvent::Tick);
        let expected = if is_ready { "True : " } else { AGENTS_AWAITED };
        assert_eq!(ingress_and_wait(&api_server), (expected.to_owned(), !is_ready));
    }
}

#[test]
fn decisions_are_reported_with_their_inputs() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let reported = |api_server: &FakeApiServer| {
        [ResourceKind::PodAutoscaler, ResourceKind::Revision].map(|resource| {
            let status = &api_server.object(resource, "hello-00001")["status"];
            status["annotations"]["rouse.dev/decision"].as_str().map(str::to_owned)
        })
    };
    assert_eq!(reported(&api_server), [None, None], "nothing is decided of what sleeps");
    api_server.decide("hello-00001", 3);
    let line = "3 pods, straight to pods: load 0.00 in the stable window, 0.00 in the panic window; \
                target 70.00 a pod; 0 ready; excess burst capacity 0";
    let both = |line: &str| [Some(line.to_owned()), Some(line.to_owned())];
    assert_eq!(reported(&api_server), both(line));
    // The same decision with other figures causes no write.
    let writes = api_server.writes;
    let repeated = ScaleDecision { stable_load: 5.0, ..decision("hello-00001", 3) };
    api_server.step(ControllerEvent::DecisionReceived(repeated));
    assert_eq!((api_server.writes, reported(&api_server)), (writes, both(line)));
    api_server.step(ControllerEvent::DecisionWithdrawn(name("hello-00001")));
    assert_eq!(reported(&api_server), [None, None]);
}
