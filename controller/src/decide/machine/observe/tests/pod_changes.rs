//! Changes of pods that the controller did not order: by Kubernetes, by its users and by Rouse's components.

use super::*;

/// Returns a service that was scaled from zero to this number of pods, all of them ready.
fn awake(wanted: u32) -> FakeApiServer {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 0, Value::Null);
    cluster.decide("hello-00001", wanted);
    cluster.ready();
    cluster
}

fn remove_decisions(cluster: &mut FakeApiServer) {
    cluster.step(ControllerEvent::DecisionStreamBegin);
    cluster.step(ControllerEvent::DecisionStreamSynced);
}

/// Changes a pod or adds one, as Kubernetes does.
fn put(cluster: &mut FakeApiServer, name: &NamespacedName, object: Value) {
    cluster.objects.insert((ResourceKind::Pod, name.clone()), object.clone());
    cluster.step(ControllerEvent::ObjectObserved(
        ResourceKind::Pod,
        name.clone(),
        Some(Box::new(object)),
    ));
}

fn change(cluster: &mut FakeApiServer, name: &NamespacedName, change: impl FnOnce(&mut Value)) {
    let mut object = cluster.objects[&(ResourceKind::Pod, name.clone())].clone();
    change(&mut object);
    put(cluster, name, object);
}

/// Adds one pod beyond the Deployment's replicas, as the beginning of a rolling update does.
fn surge(cluster: &mut FakeApiServer, number: u32) -> (NamespacedName, String) {
    let (like, _) = pods(cluster).remove(0);
    let mut object = cluster.objects[&(ResourceKind::Pod, like)].clone();
    let own = name(&format!("hello-00001-deployment-new-{number}"));
    let uid = format!("00000000-0000-4000-9000-{:012x}", 0xf000 + number);
    object["metadata"]["name"] = json!(own.name.as_str());
    object["metadata"]["uid"] = json!(uid);
    object["metadata"]["annotations"] = Value::Null;
    object["status"]["podIP"] = json!(format!("10.1.2.{number}"));
    put(cluster, &own, object);
    (own, uid)
}

fn end(cluster: &mut FakeApiServer, pod: &NamespacedName) {
    let now = cluster.now.rfc3339();
    change(cluster, pod, |it| it["metadata"]["deletionTimestamp"] = json!(now));
}

fn phase(cluster: &FakeApiServer, uid: &str) -> Option<common::wire::RoutingPhase> {
    cluster.table().pods.get(uid).map(|it| it.phase)
}

/// Makes a replica that has just started the leader.
fn another_leads(cluster: &mut FakeApiServer, decided: Option<u32>) {
    let mut other = machine().loading();
    for event in shown(&cluster.objects, &[]) {
        other.step(cluster.now, event);
    }
    other.step(cluster.now, ControllerEvent::InitialListSynced);
    (cluster.machine, cluster.other_replica) = (other, None);
    decided.into_iter().for_each(|it| cluster.decide("hello-00001", it));
    cluster.step(ControllerEvent::LeadershipChanged(true));
}

fn agent() -> ComponentReplica {
    ComponentReplica { role: ComponentRole::Agent, name: "n1".into(), node: "n1".into() }
}

#[test]
fn running_pods_are_kept_without_a_decision_while_kubernetes_replaces_them() {
    let mut cluster = awake(1);
    let (old, _) = pods(&cluster).remove(0);
    remove_decisions(&mut cluster);
    let (_, new) = surge(&mut cluster, 1);
    assert_eq!(pods_wanted(&cluster), 1, "each pod more would make the update add another one");
    end(&mut cluster, &old);
    assert_eq!(pods_wanted(&cluster), 1);
    cluster.ready();
    assert_eq!(phase(&cluster, &new), Some(Ready));
    cluster.objects.remove(&(ResourceKind::Pod, old.clone()));
    cluster.step(ControllerEvent::ObjectObserved(ResourceKind::Pod, old, None));
    assert_eq!(pods_wanted(&cluster), 1);
}

#[test]
fn running_pods_are_kept_without_a_decision_when_the_only_one_is_evicted() {
    let mut cluster = awake(1);
    let (old, _) = pods(&cluster).remove(0);
    remove_decisions(&mut cluster);
    change(&mut cluster, &old, |it| it["status"]["phase"] = json!("Failed"));
    assert_eq!(pods_wanted(&cluster), 1);
}

#[test]
fn a_new_leader_keeps_running_pods_until_a_decision() {
    let mut cluster = awake(2);
    another_leads(&mut cluster, None);
    assert_eq!(pods_wanted(&cluster), 2);
    let (evicted, _) = pods(&cluster).remove(0);
    end(&mut cluster, &evicted);
    assert_eq!(pods_wanted(&cluster), 2);
    // Pods that it planned as leader need not exist when it becomes the leader again.
    cluster.step(ControllerEvent::LeadershipChanged(false));
    for (pod, _) in pods(&cluster) {
        cluster.objects.remove(&(ResourceKind::Pod, pod.clone()));
        cluster.step(ControllerEvent::ObjectObserved(ResourceKind::Pod, pod, None));
    }
    cluster.step(ControllerEvent::LeadershipChanged(true));
    assert_eq!(pods_wanted(&cluster), 0);
}

#[test]
fn a_new_leader_adds_no_pod_to_an_update_under_way() {
    let mut cluster = awake(1);
    surge(&mut cluster, 1);
    assert_eq!(phases(&cluster), [Ready, Draining]);
    another_leads(&mut cluster, Some(1));
    assert_eq!((pods_wanted(&cluster), pods(&cluster).len()), (&json!(1), 2));
}

#[test]
fn a_former_leader_follows_the_drain_annotations_of_pods() {
    let mut cluster = awake(2);
    let now = cluster.now;
    let one = ControllerEvent::DecisionReceived(decision("hello-00001", 1));
    // The lease is lost before anything of the plan was written.
    cluster.machine.step(now, one);
    assert!(phases(&cluster).contains(&Draining));
    cluster.step(ControllerEvent::LeadershipChanged(false));
    assert_eq!(phases(&cluster), [Ready, Ready], "the next leader may let the other one go");
}

#[test]
fn a_report_that_breaks_off_twice_leaves_nothing_of_before() {
    let mut cluster = awake(2);
    let uids: Vec<_> = pods(&cluster).into_iter().map(|(_, uid)| uid).collect();
    let named = |uid: &str| {
        ControllerEvent::PodReported(agent(), PodObservation { uid: uid.into(), ..seen() })
    };
    cluster.step(ControllerEvent::ReportStreamBegin(agent(), 1));
    for uid in &uids {
        cluster.step(named(uid));
    }
    cluster.step(ControllerEvent::ReportStreamSynced(agent(), 1));
    // The agent starts again, names one of the pods, and its link breaks.
    cluster.step(ControllerEvent::ReportStreamBegin(agent(), 2));
    cluster.step(named(&uids[0]));
    cluster.step(ControllerEvent::ReportStreamEnd(agent(), 2));
    cluster.step(ControllerEvent::ReportStreamBegin(agent(), 3));
    cluster.step(named(&uids[0]));
    cluster.step(ControllerEvent::ReportStreamSynced(agent(), 3));
    assert_eq!(
        [phase(&cluster, &uids[0]), phase(&cluster, &uids[1])],
        [Some(Ready), Some(Starting)]
    );
}

#[test]
fn of_pods_that_kubernetes_keeps_a_ready_one_serves_first() {
    let mut cluster = awake(5);
    let (old, _) = pods(&cluster).remove(0);
    // A rolling update of five pods adds two; the first of them never starts.
    let (_, stuck) = surge(&mut cluster, 1);
    let (_, fine) = surge(&mut cluster, 2);
    let is_ready = PodObservation { uid: fine.clone(), ..seen() };
    cluster.step(ControllerEvent::PodReported(agent(), is_ready));
    end(&mut cluster, &old);
    assert_eq!((phase(&cluster, &fine), phase(&cluster, &stuck)), (Some(Ready), Some(Draining)));
}

#[test]
fn a_note_from_a_clock_that_is_ahead_holds_no_pod() {
    let mut cluster = awake(1);
    cluster.decide("hello-00001", 0);
    let (pod, uid) = pods(&cluster).remove(0);
    let ahead = cluster.now.plus_ms(3_600_000).rfc3339();
    let at = (ResourceKind::Pod, pod);
    cluster.objects.get_mut(&at).expect("a pod")["metadata"]["annotations"]
        [crate::model::knative::key::DRAINING] = json!(ahead);
    another_leads(&mut cluster, Some(0));
    assert_eq!(phase(&cluster, &uid), Some(Draining));
    cluster.now = cluster.now.plus_ms(300_000);
    cluster.step(ControllerEvent::Tick);
    assert_eq!(pods(&cluster).len(), 0);
}

#[test]
fn a_lost_node_that_is_removed_does_not_give_its_pods_back() {
    let mut cluster = FakeApiServer::new();
    let node = |cluster: &mut FakeApiServer, ready: Option<&str>| {
        let object =
            ready.map(|it| json!({"status": {"conditions": [{"type": "Ready", "status": it}]}}));
        cluster.step(ControllerEvent::ObjectObserved(
            ResourceKind::Node,
            NamespacedName::new("", "n1"),
            object.map(Box::new),
        ));
    };
    node(&mut cluster, Some("True"));
    cluster.service("hello", "hello:v1", 0, Value::Null);
    cluster.decide("hello-00001", 1);
    cluster.ready();
    node(&mut cluster, Some("Unknown"));
    assert_eq!(phases(&cluster), [Starting]);
    node(&mut cluster, None);
    assert_eq!(phases(&cluster), [Starting]);
    node(&mut cluster, Some("True"));
    assert_eq!(phases(&cluster), [Ready]);
    node(&mut cluster, None);
    assert_eq!(phases(&cluster), [Ready], "its agent and kubelet say when that ends");
}

/// All nodes appear lost for a moment when an API server returns after more than the grace period of nodes.
#[test]
fn a_node_that_only_kubernetes_misses_serves_on() {
    let mut cluster = awake(1);
    let kubelet_is = |cluster: &mut FakeApiServer, ready: &str| {
        let conditions = json!([{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": "True"}]);
        for (_, own) in cluster
            .objects
            .keys()
            .filter(|it| it.0 == ResourceKind::Pod)
            .cloned()
            .collect::<Vec<_>>()
        {
            change(cluster, &own, |it| it["status"]["conditions"] = conditions.clone());
        }
    };
    let node = |cluster: &mut FakeApiServer, ready: &str| {
        let object = json!({"status": {"conditions": [{"type": "Ready", "status": ready}]}});
        let own = NamespacedName::new("", "n1");
        cluster.step(ControllerEvent::ObjectObserved(
            ResourceKind::Node,
            own,
            Some(Box::new(object)),
        ));
    };
    let serves = |cluster: &FakeApiServer| (phases(cluster), cluster.table().activators.len());
    cluster.step(ControllerEvent::ReportStreamBegin(agent(), 1));
    kubelet_is(&mut cluster, "True");
    node(&mut cluster, "True");
    assert_eq!(serves(&cluster), (vec![Ready], 1));
    node(&mut cluster, "Unknown");
    kubelet_is(&mut cluster, "False");
    assert_eq!(serves(&cluster), (vec![Ready], 1), "its agent reports");
    cluster.step(ControllerEvent::ReportStreamEnd(agent(), 1));
    assert_eq!(serves(&cluster), (vec![Starting], 0));
    cluster.step(ControllerEvent::ReportStreamBegin(agent(), 2));
    assert_eq!(serves(&cluster), (vec![Ready], 1), "it is back before Kubernetes sees it");
    cluster.step(ControllerEvent::ReportStreamEnd(agent(), 2));
    node(&mut cluster, "True");
    assert_eq!(serves(&cluster), (vec![Ready], 1), "Kubernetes sees it, its agent is replaced");
}

#[test]
fn an_activator_that_was_evicted_is_not_waited_for() {
    let mut cluster = awake(1);
    let own = NamespacedName::new("knative-serving", "activator-1");
    let object = cluster.objects[&(ResourceKind::Pod, own.clone())].clone();
    let mut evicted = object;
    evicted["status"]["phase"] = json!("Failed");
    evicted["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
    put(&mut cluster, &own, evicted);
    cluster.decide("hello-00001", 0);
    let (_, uid) = pods(&cluster).remove(0);
    cluster.step(ControllerEvent::PodReported(
        agent(),
        PodObservation { uid, drained: true, ..seen() },
    ));
    assert_eq!(pods(&cluster).len(), 0);
}

#[test]
fn a_service_that_is_refused_goes_on_as_it_was() {
    let mut cluster = awake(0);
    cluster.user(
        ResourceKind::KnativeService,
        "hello",
        json!({"template": {"spec": {"containers": []}}}),
    );
    assert!(cluster.condition(ResourceKind::KnativeService, "hello", "Ready").starts_with("False"));
    cluster.decide("hello-00001", 1);
    assert_eq!(pods_wanted(&cluster), 1, "its names still lead there");
}

#[test]
fn the_last_report_of_an_ended_agent_starves_no_pod() {
    let mut cluster = FakeApiServer::new();
    let node = NamespacedName::new("knative-serving", "agent-x");
    let object = json!({
        "metadata": {"name": "agent-x", "namespace": "knative-serving", "uid": "x", "labels": {"app": "rouse-agent"}},
        "spec": {"nodeName": "n1"}, "status": {"podIP": "10.0.0.2"},
    });
    cluster.step(ControllerEvent::ObjectObserved(
        ResourceKind::Pod,
        node.clone(),
        Some(Box::new(object)),
    ));
    cluster.service("hello", "hello:v1", 0, Value::Null);
    cluster.decide("hello-00001", 1);
    let (pod, uid) = pods(&cluster).remove(0);
    cluster.step(ControllerEvent::ReportStreamBegin(agent(), 1));
    let starts = PodObservation { uid, ready: false, listening: false, ..seen() };
    cluster.step(ControllerEvent::PodReported(agent(), starts));
    cluster.step(ControllerEvent::ReportStreamSynced(agent(), 1));
    cluster.step(ControllerEvent::ReportStreamEnd(agent(), 1));
    change(&mut cluster, &pod, |it| {
        it["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    });
    assert_eq!(phases(&cluster), [Starting], "it may be back in a moment");
    cluster.step(ControllerEvent::ObjectObserved(ResourceKind::Pod, node, None));
    assert_eq!(phases(&cluster), [Ready]);
}

#[test]
fn all_replicas_say_the_same_of_an_image_that_cannot_be_found() {
    let mut cluster = FakeApiServer::new();
    cluster.service("hello", "hello:v1", 1, Value::Null);
    cluster.ready();
    cluster.resolves_digests = false;
    cluster.service("hello", "hello:v2", 1, Value::Null);
    cluster
        .step(ControllerEvent::DigestsResolved(name("hello-00002"), Err("no such image".into())));
    cluster.service("other", "hello:v2", 1, Value::Null);
    cluster
        .step(ControllerEvent::DigestsResolved(name("other-00001"), Err("no such image".into())));
    let ready = cluster.condition(ResourceKind::Revision, "other-00001", "Ready");
    assert!(ready.starts_with("False ContainerMissing"), "{ready}");
}
