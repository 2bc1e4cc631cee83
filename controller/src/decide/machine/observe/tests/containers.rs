//! Pods of several containers: ready once all of them run; they prove that the Revision works once they stay.

use super::*;

/// Applies a service with a serving container and a sidecar.
fn pair(cluster: &mut FakeApiServer, own: &str) {
    let mut template = template("hello:v2", 1);
    let serves = &mut template["spec"]["containers"][0];
    serves["ports"] = json!([{"containerPort": 8080, "name": "", "protocol": "TCP"}]);
    let helps = json!({"name": "helps", "image": "help:v1"});
    template["spec"]["containers"].as_array_mut().expect("a list").push(helps);
    cluster.user(ResourceKind::KnativeService, own, json!({"template": template}));
}

/// Reports the containers of a Revision's only pod, as the kubelet does.
fn says(cluster: &mut FakeApiServer, revision: &str, serves: &Value, helps: &Value) {
    let prefix = format!("{revision}-deployment-");
    let pods = cluster.names(ResourceKind::Pod);
    let pod = pods.into_iter().find(|it| it.name.starts_with(&prefix)).expect("a pod");
    let at = (ResourceKind::Pod, pod.clone());
    let mut object = cluster.objects[&at].clone();
    let of = |name: &str, it: &Value| {
        let mut it = it.clone();
        it["name"] = json!(name);
        it
    };
    object["status"]["containerStatuses"] =
        json!([of("user-container", serves), of("helps", helps)]);
    cluster.objects.insert(at, object.clone());
    cluster.step(ControllerEvent::ObjectObserved(ResourceKind::Pod, pod, Some(Box::new(object))));
}

fn running(restarts: u32) -> Value {
    json!({"state": {"running": {}}, "restartCount": restarts})
}

fn pass(cluster: &mut FakeApiServer, ms: u64) {
    cluster.now = cluster.now.plus_ms(ms);
    cluster.step(ControllerEvent::Tick);
}

fn targets(cluster: &FakeApiServer, own: &str) -> Vec<String> {
    let targets = &cluster.table().services[&name(own)].targets;
    targets.iter().map(|it| it.revision.name.to_string()).collect()
}

fn is(cluster: &FakeApiServer, revision: &str) -> String {
    cluster.condition(ResourceKind::Revision, revision, "Ready")
}

#[test]
fn a_pod_is_ready_once_all_of_its_containers_run() {
    let mut cluster = FakeApiServer::new();
    pair(&mut cluster, "pair");
    cluster.ready();
    let starting = [common::wire::RoutingPhase::Starting];
    assert_eq!(phases(&cluster), starting, "that something listens tells nothing of the other");
    let creating = json!({"state": {"waiting": {"reason": "ContainerCreating"}}});
    for helps in [&json!({}), &creating, &json!({"state": {}})] {
        says(&mut cluster, "pair-00001", &running(0), helps);
        assert_eq!(phases(&cluster), starting, "{helps}");
    }
    // For the serving container, the listener suffices.
    says(&mut cluster, "pair-00001", &creating, &running(0));
    assert_eq!(phases(&cluster), [common::wire::RoutingPhase::Ready]);
}

#[test]
fn a_revision_of_several_containers_is_ready_once_they_stay() {
    let mut cluster = FakeApiServer::new();
    pair(&mut cluster, "pair");
    cluster.ready();
    says(&mut cluster, "pair-00001", &running(0), &running(0));
    assert_eq!(is(&cluster, "pair-00001"), "Unknown Deploying: ");
    pass(&mut cluster, 4999);
    assert_eq!(is(&cluster, "pair-00001"), "Unknown Deploying: ");
    pass(&mut cluster, 1);
    assert_eq!(is(&cluster, "pair-00001"), "True : ");
    // Later pods serve at once.
    cluster.decide("pair-00001", 0);
    pass(&mut cluster, 1_000_000);
    cluster.decide("pair-00001", 1);
    cluster.ready();
    assert_eq!(is(&cluster, "pair-00001"), "True : ");
}

#[test]
fn a_container_that_ends_soon_after_each_start_takes_no_traffic_from_a_revision_that_works() {
    for code in [0, 7] {
        let mut cluster = FakeApiServer::new();
        cluster.service("pair", "hello:v1", 1, Value::Null);
        cluster.ready();
        assert_eq!(targets(&cluster, "pair"), ["pair-00001"]);
        pair(&mut cluster, "pair");
        let ended = json!({"terminated": {"exitCode": code, "message": "out of luck"}});
        let why = format!("False ExitCode{code}: Container failed with: out of luck");
        for round in 0..20 {
            let waits = json!({"waiting": {"reason": "CrashLoopBackOff"}});
            let waits = json!({"state": waits, "lastState": ended, "restartCount": round});
            let seen = |cluster: &FakeApiServer| {
                assert_eq!(targets(cluster, "pair"), ["pair-00001"], "round {round}");
                is(cluster, "pair-00002")
            };
            says(&mut cluster, "pair-00002", &running(0), &running(round));
            cluster.ready();
            for _ in 0..3 {
                pass(&mut cluster, 1000);
                let said = seen(&cluster);
                assert!(round == 0 || said == why, "round {round}: {said}");
            }
            for state in [&json!({"state": ended, "restartCount": round}), &waits] {
                says(&mut cluster, "pair-00002", &running(0), state);
                assert_eq!(seen(&cluster), why);
            }
            pass(&mut cluster, 10_000);
            assert_eq!(seen(&cluster), why);
        }
        // A new leader has not observed the crash.
        cluster.other_replica = None;
        cluster.machine = machine().loading();
        for event in shown(&cluster.objects, &[]) {
            cluster.step(event);
        }
        cluster.step(ControllerEvent::InitialListSynced);
        cluster.ready();
        cluster.step(ControllerEvent::LeadershipChanged(true));
        says(&mut cluster, "pair-00002", &running(0), &running(20));
        assert_eq!(is(&cluster, "pair-00002"), why);
        // This time the container stays.
        pass(&mut cluster, 5000);
        assert_eq!(is(&cluster, "pair-00002"), "True : ");
        assert_eq!(targets(&cluster, "pair"), ["pair-00002"]);
    }
}

/// Returns the only pod of a Revision.
fn only(cluster: &FakeApiServer) -> NamespacedName {
    let mut pods = cluster.names(ResourceKind::Pod).into_iter().filter(|it| it.namespace == SPACE);
    pods.next().expect("a pod")
}

/// Reports the only pod as ready or not, as the kubelet does for all of its probes.
fn passes(cluster: &mut FakeApiServer, ready: bool) {
    let pod = only(cluster);
    let at = (ResourceKind::Pod, pod.clone());
    let mut object = cluster.objects[&at].clone();
    let status = if ready { "True" } else { "False" };
    object["status"]["conditions"] = json!([{"type": "Ready", "status": status}]);
    cluster.objects.insert(at, object.clone());
    cluster.step(ControllerEvent::ObjectObserved(ResourceKind::Pod, pod, Some(Box::new(object))));
}

#[test]
fn a_command_that_passes_and_a_listener_make_a_pod_ready_together() {
    for kubelet_first in [true, false] {
        let mut cluster = FakeApiServer::new();
        let mut template = template("hello:v1", 1);
        template["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": ["true"]}});
        cluster.user(ResourceKind::KnativeService, "hello", json!({"template": template}));
        let steps: [fn(&mut FakeApiServer); 2] = if kubelet_first {
            [|it| passes(it, true), FakeApiServer::ready]
        } else {
            [FakeApiServer::ready, |it| passes(it, true)]
        };
        // The agent sees the pod, which does not listen yet.
        let uid = cluster.objects[&(ResourceKind::Pod, only(&cluster))]["metadata"]["uid"].clone();
        let agent =
            ComponentReplica { role: ComponentRole::Agent, name: "n1".into(), node: "n1".into() };
        let waits =
            PodObservation { uid: uid.as_str().expect("a uid").into(), ready: false, ..seen() };
        cluster.step(ControllerEvent::PodReported(agent, waits));
        let starting = [common::wire::RoutingPhase::Starting];
        assert_eq!(phases(&cluster), starting);
        steps[0](&mut cluster);
        assert_eq!(phases(&cluster), starting, "kubelet first: {kubelet_first}");
        steps[1](&mut cluster);
        assert_eq!(phases(&cluster), [common::wire::RoutingPhase::Ready]);
        passes(&mut cluster, false);
        assert_ne!(phases(&cluster), [common::wire::RoutingPhase::Ready], "the command fails");
    }
}
