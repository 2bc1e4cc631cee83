//! Changes of pods that the controller did not order: by Kubernetes, by its users and by Rouse's components.

use super::*;

/// Returns a service that was scaled from zero to this number of pods, all of them ready.
fn service_with_pods(requested_scale: u32) -> FakeApiServer {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", requested_scale);
    api_server.report_all_ready();
    api_server
}

fn remove_decisions(api_server: &mut FakeApiServer) {
    api_server.step(ControllerEvent::DecisionStreamBegin);
    api_server.step(ControllerEvent::DecisionStreamSynced);
}

/// Changes a pod or adds one, as Kubernetes does.
fn put_pod(api_server: &mut FakeApiServer, name: &NamespacedName, object: Value) {
    api_server.objects.insert((ResourceKind::Pod, name.clone()), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: name.clone(),
        object: Some(Box::new(object)),
    });
}

fn change_pod(
    api_server: &mut FakeApiServer,
    name: &NamespacedName,
    change: impl FnOnce(&mut Value),
) {
    let mut object = api_server.objects[&(ResourceKind::Pod, name.clone())].clone();
    change(&mut object);
    put_pod(api_server, name, object);
}

/// Adds one pod beyond the Deployment's replicas, as the beginning of a rolling update does.
fn add_surge_pod(api_server: &mut FakeApiServer, number: u32) -> (NamespacedName, String) {
    let (first_pod, _) = pods(api_server).remove(0);
    let mut object = api_server.objects[&(ResourceKind::Pod, first_pod)].clone();
    let pod_name = name(&format!("hello-00001-deployment-new-{number}"));
    let uid = format!("00000000-0000-4000-9000-{:012x}", 0xf000 + number);
    object["metadata"]["name"] = json!(pod_name.name.as_str());
    object["metadata"]["uid"] = json!(uid);
    object["metadata"]["annotations"] = Value::Null;
    object["status"]["podIP"] = json!(format!("10.1.2.{number}"));
    put_pod(api_server, &pod_name, object);
    (pod_name, uid)
}

fn terminate_pod(api_server: &mut FakeApiServer, pod: &NamespacedName) {
    let now = api_server.now.rfc3339();
    change_pod(api_server, pod, |it| it["metadata"]["deletionTimestamp"] = json!(now));
}

fn phase(api_server: &FakeApiServer, uid: &str) -> Option<common::wire::RoutingPhase> {
    api_server.table().pods.get(uid).map(|it| it.phase)
}

/// Makes a replica that has just started the leader.
fn start_new_leader(api_server: &mut FakeApiServer, decided: Option<u32>) {
    (api_server.machine, api_server.other_replica) = (api_server.start_replica(), None);
    decided.into_iter().for_each(|it| api_server.decide("hello-00001", it));
    api_server.step(ControllerEvent::LeadershipChanged(true));
}

fn agent() -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() }
}

/// Event of the pod of the agent, which exists or is deleted.
fn agent_pod_observed(exists: bool) -> ControllerEvent {
    let object = json!({
        "metadata": {"name": "rouse-agent-1", "namespace": "knative-serving", "labels": {"app": "rouse-agent"}},
        "spec": {"nodeName": agent().node},
        "status": {"phase": "Running"},
    });
    ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: NamespacedName::new("knative-serving", "rouse-agent-1"),
        object: exists.then(|| Box::new(object)),
    }
}

#[test]
fn running_pods_are_kept_without_a_decision_while_kubernetes_replaces_them() {
    let mut api_server = service_with_pods(1);
    let (old, _) = pods(&api_server).remove(0);
    remove_decisions(&mut api_server);
    let (_, new) = add_surge_pod(&mut api_server, 1);
    assert_eq!(
        requested_replicas(&api_server),
        1,
        "with more replicas, the update would add another pod"
    );
    terminate_pod(&mut api_server, &old);
    assert_eq!(requested_replicas(&api_server), 1);
    api_server.report_all_ready();
    assert_eq!(phase(&api_server, &new), Some(Ready));
    api_server.objects.remove(&(ResourceKind::Pod, old.clone()));
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: old,
        object: None,
    });
    assert_eq!(requested_replicas(&api_server), 1);
}

#[test]
fn running_pods_are_kept_without_a_decision_when_the_only_one_is_evicted() {
    let mut api_server = service_with_pods(1);
    let (old, _) = pods(&api_server).remove(0);
    remove_decisions(&mut api_server);
    change_pod(&mut api_server, &old, |it| it["status"]["phase"] = json!("Failed"));
    assert_eq!(requested_replicas(&api_server), 1);
}

#[test]
fn a_new_leader_keeps_running_pods_until_a_decision() {
    let mut api_server = service_with_pods(2);
    start_new_leader(&mut api_server, None);
    assert_eq!(requested_replicas(&api_server), 2);
    let (evicted, _) = pods(&api_server).remove(0);
    terminate_pod(&mut api_server, &evicted);
    assert_eq!(requested_replicas(&api_server), 2);
    // Pods that it planned as leader need not exist when it becomes the leader again.
    api_server.step(ControllerEvent::LeadershipChanged(false));
    for (pod, _) in pods(&api_server) {
        api_server.objects.remove(&(ResourceKind::Pod, pod.clone()));
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: pod,
            object: None,
        });
    }
    api_server.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(requested_replicas(&api_server), 0);
}

#[test]
fn a_new_leader_adds_no_pod_to_an_update_under_way() {
    let mut api_server = service_with_pods(1);
    add_surge_pod(&mut api_server, 1);
    assert_eq!(phases(&api_server), [Ready, Draining]);
    start_new_leader(&mut api_server, Some(1));
    assert_eq!((requested_replicas(&api_server), pods(&api_server).len()), (&json!(1), 2));
}

#[test]
fn a_former_leader_follows_the_drain_annotations_of_pods() {
    let mut api_server = service_with_pods(2);
    let now = api_server.now;
    let one = ControllerEvent::DecisionReceived(decision("hello-00001", 1));
    // The lease is lost before anything of the plan was written.
    api_server.machine.step(now, one);
    assert!(phases(&api_server).contains(&Draining));
    api_server.step(ControllerEvent::LeadershipChanged(false));
    assert_eq!(phases(&api_server), [Ready, Ready], "the next leader may let the other one go");
}

#[test]
fn pods_that_are_not_named_after_two_broken_streams_are_not_ready() {
    let mut api_server = service_with_pods(2);
    let uids: Vec<_> = pods(&api_server).into_iter().map(|(_, uid)| uid).collect();
    let named = |stream: u64, uid: &str| ControllerEvent::PodReported {
        reporter: agent(),
        stream,
        observation: PodObservation { uid: uid.into(), ..ready_observation() },
    };
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    for uid in &uids {
        api_server.step(named(1, uid));
    }
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 1 });
    // The agent starts again, names one of the pods, and its link breaks.
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 2 });
    api_server.step(named(2, &uids[0]));
    api_server.step(ControllerEvent::ReportStreamEnd { reporter: agent(), stream: 2 });
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 3 });
    api_server.step(named(3, &uids[0]));
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 3 });
    assert_eq!(
        [phase(&api_server, &uids[0]), phase(&api_server, &uids[1])],
        [Some(Ready), Some(Starting)]
    );
}

#[test]
fn a_ready_surplus_pod_serves_again_before_one_that_is_not_ready() {
    let mut api_server = service_with_pods(5);
    let (old, _) = pods(&api_server).remove(0);
    // A rolling update of five pods adds two; the first of them never starts.
    let (_, stuck) = add_surge_pod(&mut api_server, 1);
    let (_, fine) = add_surge_pod(&mut api_server, 2);
    let is_ready = PodObservation { uid: fine.clone(), ..ready_observation() };
    api_server.step(ControllerEvent::PodReported {
        reporter: agent(),
        stream: 1,
        observation: is_ready,
    });
    terminate_pod(&mut api_server, &old);
    assert_eq!(
        (phase(&api_server, &fine), phase(&api_server, &stuck)),
        (Some(Ready), Some(Draining))
    );
}

#[test]
fn a_drain_annotation_in_the_future_does_not_prolong_the_drain() {
    let mut api_server = service_with_pods(1);
    api_server.decide("hello-00001", 0);
    let (pod, uid) = pods(&api_server).remove(0);
    let ahead = api_server.now.plus_ms(3_600_000).rfc3339();
    let at = (ResourceKind::Pod, pod);
    api_server.objects.get_mut(&at).expect("a pod")["metadata"]["annotations"]
        [crate::model::knative::key::DRAINING] = json!(ahead);
    start_new_leader(&mut api_server, Some(0));
    assert_eq!(phase(&api_server, &uid), Some(Draining));
    api_server.now = api_server.now.plus_ms(300_000);
    api_server.step(ControllerEvent::Tick);
    assert_eq!(pods(&api_server).len(), 0);
}

#[test]
fn pods_of_a_lost_node_stay_not_ready_after_its_deletion() {
    let mut api_server = FakeApiServer::new();
    let node = |api_server: &mut FakeApiServer, ready: Option<&str>| {
        let object =
            ready.map(|it| json!({"status": {"conditions": [{"type": "Ready", "status": it}]}}));
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Node,
            name: NamespacedName::new("", "n1"),
            object: object.map(Box::new),
        });
    };
    node(&mut api_server, Some("True"));
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    node(&mut api_server, Some("Unknown"));
    assert_eq!(phases(&api_server), [Starting]);
    node(&mut api_server, None);
    assert_eq!(phases(&api_server), [Starting]);
    node(&mut api_server, Some("True"));
    assert_eq!(phases(&api_server), [Ready]);
    node(&mut api_server, None);
    assert_eq!(phases(&api_server), [Ready], "its agent and kubelet report when that ends");
}

/// A cloud sets the zone of a node a little after its creation, and each kind has a watch of its own.
#[test]
fn pods_and_activators_get_the_zone_of_a_node_that_is_observed_late() {
    let mut api_server = service_with_pods(1);
    let zones = |api_server: &FakeApiServer| {
        let table = api_server.table();
        let pods = table.pods.values().map(|it| it.zone.clone());
        pods.chain(table.activators.values().map(|it| it.zone.clone())).collect::<Vec<_>>()
    };
    assert_eq!(zones(&api_server), ["", ""]);
    let node = json!({
        "metadata": {"labels": {"topology.kubernetes.io/zone": "z1"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    });
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Node,
        name: NamespacedName::new("", "n1"),
        object: Some(Box::new(node)),
    });
    assert_eq!(zones(&api_server), ["z1", "z1"]);
    let slice = api_server.object(ResourceKind::EndpointSlice, "hello");
    assert_eq!(slice["endpoints"][0]["zone"], "z1");
}

/// All nodes appear lost for a moment when an API server returns after more than the grace period of nodes.
#[test]
fn pods_of_a_lost_node_serve_while_its_agent_reports() {
    let mut api_server = service_with_pods(1);
    let kubelet_is = |api_server: &mut FakeApiServer, ready: &str| {
        let conditions = json!([{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": "True"}]);
        for (_, pod_name) in api_server
            .objects
            .keys()
            .filter(|it| it.0 == ResourceKind::Pod)
            .cloned()
            .collect::<Vec<_>>()
        {
            change_pod(api_server, &pod_name, |it| it["status"]["conditions"] = conditions.clone());
        }
    };
    let node = |api_server: &mut FakeApiServer, ready: &str| {
        let object = json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}});
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Node,
            name: NamespacedName::new("", "n1"),
            object: Some(Box::new(object)),
        });
    };
    let serves =
        |api_server: &FakeApiServer| (phases(api_server), api_server.table().activators.len());
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    kubelet_is(&mut api_server, "True");
    node(&mut api_server, "True");
    assert_eq!(serves(&api_server), (vec![Ready], 1));
    node(&mut api_server, "Unknown");
    kubelet_is(&mut api_server, "False");
    assert_eq!(serves(&api_server), (vec![Ready], 1), "its agent reports");
    api_server.step(ControllerEvent::ReportStreamEnd { reporter: agent(), stream: 1 });
    assert_eq!(serves(&api_server), (vec![Starting], 0));
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 2 });
    assert_eq!(serves(&api_server), (vec![Ready], 1), "it is back before Kubernetes sees it");
    api_server.step(ControllerEvent::ReportStreamEnd { reporter: agent(), stream: 2 });
    node(&mut api_server, "True");
    assert_eq!(serves(&api_server), (vec![Ready], 1), "Kubernetes sees it, its agent is replaced");
}

#[test]
fn a_deleted_node_that_was_lost_is_forgotten_with_its_last_pod() {
    let mut api_server = service_with_pods(1);
    let (pod, _) = pods(&api_server).remove(0);
    let node = |object: Option<Value>| ControllerEvent::ObjectObserved {
        resource: ResourceKind::Node,
        name: NamespacedName::new("", "n1"),
        object: object.map(Box::new),
    };
    let not_ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    api_server.step(node(Some(not_ready)));
    api_server.step(node(None));
    let known_nodes = |it: &FakeApiServer| it.machine.cluster().nodes.states.len();
    let serves = |it: &FakeApiServer| (phases(it), it.table().activators.len());
    assert_eq!((known_nodes(&api_server), serves(&api_server)), (1, (vec![Starting], 0)));
    let delete_pod = |api_server: &mut FakeApiServer, name: &NamespacedName| {
        let events = api_server.delete(ResourceKind::Pod, name);
        events.into_iter().for_each(|event| api_server.step(event));
    };
    delete_pod(&mut api_server, &pod);
    assert_eq!((known_nodes(&api_server), serves(&api_server)), (1, (vec![], 0)));
    delete_pod(&mut api_server, &NamespacedName::new("knative-serving", "activator-1"));
    let nodes = &api_server.machine.cluster().nodes;
    assert_eq!((nodes.states.len(), nodes.deleted.len()), (0, 0));
}

/// With more nodes, each activator would have a stream of too many agents.
#[test]
fn agents_of_all_nodes_report_to_each_activator_in_a_cluster_of_few_nodes() {
    let mut api_server = FakeApiServer::new();
    let observe_node = |api_server: &mut FakeApiServer, number: u32, exists: bool| {
        let node = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let object = exists.then_some(node);
        let name = NamespacedName::new("", format!("node-{number}"));
        let key = (ResourceKind::Node, name.clone());
        match &object {
            Some(node) => drop(api_server.objects.insert(key, node.clone())),
            None => drop(api_server.objects.remove(&key)),
        }
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Node,
            name,
            object: object.map(Box::new),
        });
    };
    let in_table = |table: common::wire::RouteTable| {
        table.activators.into_values().map(|it| it.gets_all_reports).collect::<Vec<bool>>()
    };
    let get_all_reports = |api_server: &FakeApiServer| in_table(api_server.table());
    assert_eq!(get_all_reports(&api_server), [false], "no node is known");
    (1..=64).for_each(|number| observe_node(&mut api_server, number, true));
    assert_eq!(get_all_reports(&api_server), [true]);
    observe_node(&mut api_server, 65, true);
    assert_eq!(get_all_reports(&api_server), [false]);
    api_server.step(activator("activator-22", false));
    assert_eq!(get_all_reports(&api_server), [false; 2]);
    let new_replica = |api_server: &FakeApiServer| in_table(table(&api_server.start_replica()));
    assert_eq!(new_replica(&api_server), [false]);
    observe_node(&mut api_server, 1, false);
    assert_eq!(get_all_reports(&api_server), [true; 2]);
    assert_eq!(new_replica(&api_server), [true]);
}

#[test]
fn an_activator_that_was_evicted_is_not_waited_for() {
    let mut api_server = service_with_pods(1);
    let pod_name = NamespacedName::new("knative-serving", "activator-1");
    let object = api_server.objects[&(ResourceKind::Pod, pod_name.clone())].clone();
    let mut evicted = object;
    evicted["status"]["phase"] = json!("Failed");
    evicted["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
    put_pod(&mut api_server, &pod_name, evicted);
    api_server.decide("hello-00001", 0);
    let (_, uid) = pods(&api_server).remove(0);
    api_server.step(ControllerEvent::PodReported {
        reporter: agent(),
        stream: 1,
        observation: PodObservation { uid, drained: true, ..ready_observation() },
    });
    assert_eq!(pods(&api_server).len(), 0);
}

#[test]
fn a_service_with_a_refused_manifest_still_scales() {
    let mut api_server = service_with_pods(0);
    api_server.apply_as_user(
        ResourceKind::KnativeService,
        "hello",
        json!({"template": {"spec": {"containers": []}}}),
    );
    assert!(
        api_server.condition(ResourceKind::KnativeService, "hello", "Ready").starts_with("False")
    );
    api_server.decide("hello-00001", 1);
    assert_eq!(requested_replicas(&api_server), 1, "requests are still routed to it");
}

#[test]
fn a_not_ready_report_is_dropped_with_its_agents_pod() {
    let mut api_server = FakeApiServer::new();
    let agent_pod = NamespacedName::new("knative-serving", "agent-x");
    let object = json!({
        "metadata": {"name": "agent-x", "namespace": "knative-serving", "uid": "x", "labels": {"app": "rouse-agent"}},
        "spec": {"nodeName": "n1"}, "status": {"podIP": "10.0.0.2"},
    });
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: agent_pod.clone(),
        object: Some(Box::new(object)),
    });
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    let (pod, uid) = pods(&api_server).remove(0);
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    let starts = PodObservation { uid, ready: false, listening: false, ..ready_observation() };
    api_server.step(ControllerEvent::PodReported {
        reporter: agent(),
        stream: 1,
        observation: starts,
    });
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 1 });
    api_server.step(ControllerEvent::ReportStreamEnd { reporter: agent(), stream: 1 });
    change_pod(&mut api_server, &pod, |it| {
        it["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    });
    assert_eq!(phases(&api_server), [Starting], "the agent may be back in a moment");
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: agent_pod,
        object: None,
    });
    assert_eq!(phases(&api_server), [Ready]);
}

/// Reports the only pod as its agent sees it, and returns true if its agent's next report may make it ready.
fn awaits_report_after(api_server: &mut FakeApiServer, observation: PodObservation) -> bool {
    let (_, uid) = pods(api_server).remove(0);
    let observation = PodObservation { uid: uid.clone(), ..observation };
    let event = ControllerEvent::PodReported { reporter: agent(), stream: 1, observation };
    api_server.step(event);
    api_server.table().pods[&uid].awaits_report
}

/// Observation of a pod that listens, and whose probe has not passed.
fn unready_observation() -> PodObservation {
    PodObservation { ready: false, ..ready_observation() }
}

#[test]
fn a_pod_awaits_the_report_of_its_agent_while_nothing_else_is_missing() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    let (pod, uid) = pods(&api_server).remove(0);
    let awaits = |it: &FakeApiServer| it.table().pods[&uid].awaits_report;
    assert!(!awaits(&api_server), "its agent has not seen it");
    let without_address = PodObservation { address: None, ..unready_observation() };
    assert!(!awaits_report_after(&mut api_server, without_address), "the address may be another");
    assert!(awaits_report_after(&mut api_server, unready_observation()));
    assert_eq!(api_server.table().pods[&uid].address, unready_observation().address);
    assert!(!awaits_report_after(&mut api_server, ready_observation()), "it is ready");
    assert_eq!(phases(&api_server), [Ready]);
    assert!(awaits_report_after(&mut api_server, unready_observation()));
    for is_ready in ["True", "False"] {
        change_pod(&mut api_server, &pod, |it| {
            it["status"]["conditions"] = json!([{"type": "Ready", "status": is_ready}]);
        });
    }
    assert!(!awaits(&api_server), "the kubelet has withdrawn its readiness");
    assert!(!awaits_report_after(&mut api_server, ready_observation()));
    assert_eq!(phases(&api_server), [Starting]);
}

/// An activator may have sent it a request that no report shows yet, also if more is missing again meanwhile.
#[test]
fn a_surplus_pod_that_awaits_or_awaited_a_report_drains() {
    let without_address = PodObservation { address: None, ..unready_observation() };
    for (last, awaits) in [(unready_observation(), true), (without_address, false)] {
        let mut api_server = FakeApiServer::new();
        api_server.apply_service("hello", "hello:v1", 0, Value::Null);
        api_server.decide("hello-00001", 1);
        assert!(awaits_report_after(&mut api_server, unready_observation()));
        assert_eq!(awaits_report_after(&mut api_server, last), awaits);
        api_server.decide("hello-00001", 0);
        assert_eq!(phases(&api_server), [Draining]);
        assert_eq!(requested_replicas(&api_server), 1, "it drains before it stops: {awaits}");
        let drained = PodObservation { drained: true, ..unready_observation() };
        assert!(!awaits_report_after(&mut api_server, drained), "it leaves");
        api_server.now = api_server.now.plus_ms(1000);
        api_server.step(ControllerEvent::Tick);
        assert_eq!(pods(&api_server).len(), 0);
    }
}

#[test]
fn all_replicas_have_the_same_table_if_an_image_is_missing() {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 1, Value::Null);
    api_server.report_all_ready();
    api_server.completes_digests = false;
    api_server.apply_service("hello", "hello:v2", 1, Value::Null);
    api_server.step(ControllerEvent::DigestsResolved {
        revision: name("hello-00002"),
        resolution: Err("no such image".into()),
    });
    api_server.apply_service("other", "hello:v2", 1, Value::Null);
    api_server.step(ControllerEvent::DigestsResolved {
        revision: name("other-00001"),
        resolution: Err("no such image".into()),
    });
    let ready = api_server.condition(ResourceKind::Revision, "other-00001", "Ready");
    assert!(ready.starts_with("False ContainerMissing"), "{ready}");
}

/// The controller may read the end of an older stream after the newer one has begun.
#[test]
fn late_messages_of_an_older_report_stream_change_nothing() {
    let mut api_server = service_with_pods(1);
    let (_, uid) = pods(&api_server).remove(0);
    let reporter = agent();
    let begin = |stream| ControllerEvent::ReportStreamBegin { reporter: agent(), stream };
    api_server.step(begin(1));
    api_server.step(ControllerEvent::PodReported {
        reporter: reporter.clone(),
        stream: 1,
        observation: PodObservation { uid: uid.clone(), ..ready_observation() },
    });
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: reporter.clone(), stream: 1 });
    let phases_before = phases(&api_server);
    api_server.step(begin(2));
    let late_messages = [
        ControllerEvent::PodReportWithdrawn { reporter: agent(), stream: 1, pod_uid: uid.clone() },
        ControllerEvent::PodReported {
            reporter: agent(),
            stream: 1,
            observation: PodObservation { uid: uid.clone(), ready: false, ..ready_observation() },
        },
        ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 1 },
    ];
    for message in late_messages {
        api_server.step(message);
        assert_eq!(phases(&api_server), phases_before);
    }
    // The newest stream has the last word: it does not name the pod.
    api_server.step(ControllerEvent::ReportStreamSynced { reporter, stream: 2 });
    assert!(!api_server.machine.cluster().pods.reports.contains_key(&uid));
}

/// In a rollout of the agents, the new agent's stream may begin before the old agent's pod is seen as deleted.
#[test]
fn pods_that_a_new_agent_does_not_name_are_forgotten_although_the_old_agent_ends_first() {
    let mut api_server = service_with_pods(1);
    let (_, uid) = pods(&api_server).remove(0);
    api_server.step(agent_pod_observed(true));
    let begin = |stream| ControllerEvent::ReportStreamBegin { reporter: agent(), stream };
    api_server.step(begin(1));
    api_server.step(ControllerEvent::PodReported {
        reporter: agent(),
        stream: 1,
        observation: PodObservation { uid: uid.clone(), ..ready_observation() },
    });
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 1 });
    api_server.step(begin(2));
    api_server.step(agent_pod_observed(false));
    let is_reported = |it: &FakeApiServer| it.machine.cluster().pods.reports.contains_key(&uid);
    assert!(is_reported(&api_server), "the new stream has not named all pods yet");
    api_server.step(ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 2 });
    assert!(!is_reported(&api_server));
}

/// Two streams of one agent may begin in either order, since each has a task of its own.
#[test]
fn a_report_stream_that_begins_after_a_newer_one_has_no_effect() {
    let mut api_server = service_with_pods(1);
    let (_, uid) = pods(&api_server).remove(0);
    let reported = |stream, ready| ControllerEvent::PodReported {
        reporter: agent(),
        stream,
        observation: PodObservation { uid: uid.clone(), ready, ..ready_observation() },
    };
    for event in [
        ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 2 },
        reported(2, true),
        ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 },
        reported(1, false),
        ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 1 },
        ControllerEvent::ReportStreamEnd { reporter: agent(), stream: 1 },
        ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 2 },
    ] {
        api_server.step(event);
    }
    let pods = &api_server.machine.cluster().pods;
    assert_eq!(pods.reporters.len(), 1, "stream 2 is open");
    assert!(pods.reports[&uid].ready);
}

/// Each stream has a task of its own, so the last messages of an older one may follow the end of the newest.
#[test]
fn a_late_report_has_no_effect_after_the_newest_stream_has_ended() {
    let mut api_server = service_with_pods(1);
    let reporter =
        || ComponentReplica { role: ClientComponent::Agent, name: "n2".into(), node: "n2".into() };
    let begin = |stream| ControllerEvent::ReportStreamBegin { reporter: reporter(), stream };
    let is_recorded =
        |api_server: &FakeApiServer| api_server.machine.pods_by_reporter.contains_key("Agent/n2");
    api_server.step(begin(1));
    api_server.step(begin(2));
    api_server.step(ControllerEvent::ReportStreamEnd { reporter: reporter(), stream: 2 });
    assert!(!is_recorded(&api_server));
    api_server.step(ControllerEvent::PodReported {
        reporter: reporter(),
        stream: 1,
        observation: PodObservation { uid: "not-observed".into(), ..ready_observation() },
    });
    api_server.step(ControllerEvent::ReportStreamEnd { reporter: reporter(), stream: 1 });
    assert!(!is_recorded(&api_server));
    api_server.step(begin(3));
    assert!(is_recorded(&api_server));
}

#[test]
fn nothing_is_left_of_an_agent_whose_node_was_removed() {
    let begin = |stream| ControllerEvent::ReportStreamBegin { reporter: agent(), stream };
    let end = |stream| ControllerEvent::ReportStreamEnd { reporter: agent(), stream };
    let deleted = || agent_pod_observed(false);
    for last_events in [[end(2), deleted()], [deleted(), end(2)]] {
        let mut api_server = service_with_pods(1);
        let (pod, uid) = pods(&api_server).remove(0);
        api_server.step(agent_pod_observed(true));
        api_server.step(begin(1));
        for uid in [uid.as_str(), "never-observed"] {
            api_server.step(ControllerEvent::PodReported {
                reporter: agent(),
                stream: 1,
                observation: PodObservation { uid: uid.into(), ..ready_observation() },
            });
        }
        // Its second stream breaks before it has named the pods again.
        api_server.step(begin(2));
        api_server.step(end(1));
        last_events.into_iter().for_each(|event| api_server.step(event));
        assert!(
            api_server.machine.cluster().pods.reports.contains_key(&uid),
            "the kubelet decides about the pod"
        );
        terminate_pod(&mut api_server, &pod);
        let object = None;
        let resource = ResourceKind::Pod;
        api_server.step(ControllerEvent::ObjectObserved { resource, name: pod, object });
        assert_eq!(api_server.machine.pods_by_reporter.len(), 0);
    }
}

#[test]
fn nothing_is_left_of_an_activator_whose_stream_outlives_its_pod() {
    let mut api_server = service_with_pods(0);
    let pod = NamespacedName::new("knative-serving", "activator-1");
    let reporter = || ComponentReplica {
        role: ClientComponent::Activator,
        name: pod.name.to_string(),
        node: String::new(),
    };
    let uid = || "p".to_owned();
    for event in [
        ControllerEvent::ReportStreamBegin { reporter: reporter(), stream: 7 },
        ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: pod.clone(),
            object: None,
        },
        ControllerEvent::PodReportWithdrawn { reporter: reporter(), stream: 7, pod_uid: uid() },
        ControllerEvent::ReportStreamSynced { reporter: reporter(), stream: 7 },
        ControllerEvent::ReportStreamEnd { reporter: reporter(), stream: 7 },
    ] {
        api_server.step(event);
    }
    assert_eq!(api_server.machine.pods_by_reporter.len(), 0);
}

#[test]
fn a_pod_is_ready_only_with_the_readiness_gates_that_a_webhook_injected() {
    for is_reported in [false, true] {
        let mut api_server = FakeApiServer::new();
        api_server.apply_service("hello", "hello:v1", 0, Value::Null);
        api_server.decide("hello-00001", 1);
        let (pod, uid) = pods(&api_server).remove(0);
        let set_conditions = |api_server: &mut FakeApiServer, ready: &str, gate: &str| {
            change_pod(api_server, &pod, |it| {
                it["spec"]["readinessGates"] = json!([{"conditionType": "example.com/target"}]);
                it["status"]["conditions"] = json!([
                    {"type": "Ready", "status": ready},
                    {"type": "ContainersReady", "status": "True"},
                    {"type": "example.com/target", "status": gate},
                ]);
            });
        };
        set_conditions(&mut api_server, "False", "False");
        if is_reported {
            api_server.step(ControllerEvent::PodReported {
                reporter: agent(),
                stream: 1,
                observation: PodObservation { uid, ..ready_observation() },
            });
        }
        assert_eq!(phases(&api_server), [Starting], "reported: {is_reported}");
        set_conditions(&mut api_server, "True", "True");
        assert_eq!(phases(&api_server), [Ready], "reported: {is_reported}");
        // The node controller withdraws only the condition `Ready`.
        set_conditions(&mut api_server, "False", "True");
        assert_eq!(phases(&api_server), [Ready], "reported: {is_reported}");
        set_conditions(&mut api_server, "False", "False");
        assert_eq!(phases(&api_server), [Starting], "reported: {is_reported}");
    }
}

/// Stores the Service without an admission webhook.
fn put_service(api_server: &mut FakeApiServer, object: Value) {
    api_server.objects.insert((ResourceKind::KnativeService, name("hello")), object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::KnativeService,
        name: name("hello"),
        object: Some(Box::new(object)),
    });
}

#[test]
fn a_refused_service_keeps_its_labels_and_annotations_after_a_restart() {
    let mut api_server = service_with_pods(0);
    let mut object = api_server.object(ResourceKind::KnativeService, "hello").clone();
    object["metadata"]["labels"] = json!({"networking.knative.dev/visibility": "cluster-local"});
    object["metadata"]["annotations"] = json!({"rouse.dev/path": "activator"});
    put_service(&mut api_server, object.clone());
    object["spec"]["template"]["spec"]["containers"] = json!([]);
    put_service(&mut api_server, object);
    let app = |api_server: &FakeApiServer| {
        let app = &api_server.machine.cluster().apps[&name("hello")];
        (app.route_labels(), app.route_annotations())
    };
    let old_app = app(&api_server);
    assert!(!old_app.0.is_empty() && !old_app.1.is_empty());
    start_new_leader(&mut api_server, None);
    let service = api_server.machine.cluster().apps[&name("hello")].service.as_ref();
    assert!(service.is_some_and(|it| it.manifest_error.is_some()));
    assert_eq!(app(&api_server), old_app);
}

/// After an outage of their watch, a replica observes a Revision that was made again later than its pod.
#[test]
fn a_pod_that_is_observed_before_the_new_revision_of_its_name_serves() {
    let api_server = service_with_pods(1);
    let (old_pod, _) = pods(&api_server).remove(0);
    let mut follower = api_server.start_replica();
    follower.step(api_server.now, ControllerEvent::DecisionReceived(decision("hello-00001", 2)));
    let later = api_server.now.plus_ms(60_000);
    let make_again = |object: &Value, uid: &str| {
        let mut object = object.clone();
        object["metadata"]["uid"] = json!(uid);
        object["metadata"]["creationTimestamp"] = json!(later.rfc3339());
        object
    };
    let pod_uid = "00000000-0000-4000-9000-00000000ffff";
    let mut pod = make_again(&api_server.objects[&(ResourceKind::Pod, old_pod)], pod_uid);
    let pod_name = name("hello-00001-deployment-new");
    pod["metadata"]["name"] = json!(pod_name.name.as_str());
    pod["status"]["podIP"] = json!("10.1.2.1");
    pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    let revision = api_server.object(ResourceKind::Revision, "hello-00001");
    let revision = make_again(revision, "00000000-0000-4000-8000-00000000ffff");
    for (resource, name, object) in [
        (ResourceKind::Pod, pod_name, pod),
        (ResourceKind::Revision, name("hello-00001"), revision),
    ] {
        let object = Some(Box::new(object));
        follower.step(later, ControllerEvent::ObjectObserved { resource, name, object });
    }
    let phase = table(&follower).pods[pod_uid].phase;
    assert_eq!(phase, common::wire::RoutingPhase::Ready);
}
