//! Pods of several containers: ready once all of them run. They prove that the Revision works once all of them have run
//! for five seconds, and longer after a container has ended. Also pods with a readiness probe that the kubelet runs.

use super::*;

/// Applies a service with a serving container and a sidecar.
fn apply_service_with_sidecar(api_server: &mut FakeApiServer, name: &str) {
    let mut template = template("hello:v2", 1);
    let serving = &mut template["spec"]["containers"][0];
    serving["ports"] = json!([{"containerPort": 8080, "name": "", "protocol": "TCP"}]);
    let sidecar = json!({"name": "sidecar", "image": "sidecar:v1"});
    template["spec"]["containers"].as_array_mut().expect("a list").push(sidecar);
    api_server.apply_as_user(ResourceKind::KnativeService, name, json!({"template": template}));
}

/// Reports the containers of a Revision's only pod, as the kubelet does.
fn report_containers(
    api_server: &mut FakeApiServer,
    revision: &str,
    serving: &Value,
    sidecar: &Value,
) {
    let prefix = format!("{revision}-deployment-");
    let pods = api_server.names(ResourceKind::Pod);
    let pod = pods.into_iter().find(|it| it.name.starts_with(&prefix)).expect("a pod");
    let at = (ResourceKind::Pod, pod.clone());
    let mut object = api_server.objects[&at].clone();
    let of = |name: &str, it: &Value| {
        let mut it = it.clone();
        it["name"] = json!(name);
        it
    };
    object["status"]["containerStatuses"] =
        json!([of("user-container", serving), of("sidecar", sidecar)]);
    api_server.objects.insert(at, object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: pod,
        object: Some(Box::new(object)),
    });
}

fn running(restarts: u32) -> Value {
    json!({"state": {"running": {}}, "restartCount": restarts})
}

fn advance_time(api_server: &mut FakeApiServer, ms: u64) {
    api_server.now = api_server.now.plus_ms(ms);
    api_server.step(ControllerEvent::Tick);
}

fn targets(api_server: &FakeApiServer, object_name: &str) -> Vec<String> {
    let targets = &api_server.table().services[&name(object_name)].targets;
    targets.iter().map(|it| it.revision.name.to_string()).collect()
}

fn ready_condition(api_server: &FakeApiServer, revision: &str) -> String {
    api_server.condition(ResourceKind::Revision, revision, "Ready")
}

#[test]
fn a_pod_is_ready_once_all_of_its_containers_run() {
    let mut api_server = FakeApiServer::new();
    apply_service_with_sidecar(&mut api_server, "pair");
    api_server.report_all_ready();
    let starting = [common::wire::RoutingPhase::Starting];
    assert_eq!(phases(&api_server), starting, "nothing is known of the sidecar");
    let creating = json!({"state": {"waiting": {"reason": "ContainerCreating"}}});
    for sidecar in [&json!({}), &creating, &json!({"state": {}})] {
        report_containers(&mut api_server, "pair-00001", &running(0), sidecar);
        assert_eq!(phases(&api_server), starting, "{sidecar}");
    }
    // For the serving container, the listener suffices.
    report_containers(&mut api_server, "pair-00001", &creating, &running(0));
    assert_eq!(phases(&api_server), [common::wire::RoutingPhase::Ready]);
}

/// Returns for each pod if the next report of its agent may make it ready.
fn awaited_reports(api_server: &FakeApiServer) -> Vec<bool> {
    api_server.table().pods.into_values().map(|it| it.awaits_report).collect()
}

#[test]
fn a_pod_awaits_the_report_of_its_agent_only_while_all_of_its_containers_run() {
    let mut api_server = FakeApiServer::new();
    apply_service_with_sidecar(&mut api_server, "pair");
    report_only_pod(&mut api_server, false);
    assert_eq!(awaited_reports(&api_server), [false], "nothing is known of the sidecar");
    report_containers(&mut api_server, "pair-00001", &running(0), &running(0));
    assert_eq!(awaited_reports(&api_server), [true]);
    let ended = json!({"state": {"terminated": {"exitCode": 1}}});
    report_containers(&mut api_server, "pair-00001", &running(0), &ended);
    assert_eq!(awaited_reports(&api_server), [false], "the sidecar has ended");
}

#[test]
fn a_revision_of_several_containers_is_ready_after_five_seconds() {
    let mut api_server = FakeApiServer::new();
    apply_service_with_sidecar(&mut api_server, "pair");
    api_server.report_all_ready();
    report_containers(&mut api_server, "pair-00001", &running(0), &running(0));
    assert_eq!(ready_condition(&api_server, "pair-00001"), "Unknown Deploying: ");
    advance_time(&mut api_server, 4999);
    assert_eq!(ready_condition(&api_server, "pair-00001"), "Unknown Deploying: ");
    advance_time(&mut api_server, 1);
    assert_eq!(ready_condition(&api_server, "pair-00001"), "True : ");
    // Later pods serve at once.
    api_server.decide("pair-00001", 0);
    advance_time(&mut api_server, 1_000_000);
    api_server.decide("pair-00001", 1);
    api_server.report_all_ready();
    assert_eq!(ready_condition(&api_server, "pair-00001"), "True : ");
}

#[test]
fn a_container_that_ends_soon_after_each_start_takes_no_traffic_from_a_revision_that_works() {
    for code in [0, 7] {
        let mut api_server = FakeApiServer::new();
        api_server.apply_service("pair", "hello:v1", 1, Value::Null);
        api_server.report_all_ready();
        assert_eq!(targets(&api_server, "pair"), ["pair-00001"]);
        apply_service_with_sidecar(&mut api_server, "pair");
        let ended = json!({"terminated": {"exitCode": code, "message": "out of luck"}});
        let exit_reason = format!("False ExitCode{code}: Container failed with: out of luck");
        for round in 0..20 {
            let waits = json!({"waiting": {"reason": "CrashLoopBackOff"}});
            let waits = json!({"state": waits, "lastState": ended, "restartCount": round});
            let condition_without_traffic = |api_server: &FakeApiServer| {
                assert_eq!(targets(api_server, "pair"), ["pair-00001"], "round {round}");
                ready_condition(api_server, "pair-00002")
            };
            report_containers(&mut api_server, "pair-00002", &running(0), &running(round));
            api_server.report_all_ready();
            for _ in 0..3 {
                advance_time(&mut api_server, 1000);
                let condition = condition_without_traffic(&api_server);
                // In the first round the container has not ended yet.
                assert!(round == 0 || condition == exit_reason, "round {round}: {condition}");
            }
            for state in [&json!({"state": ended, "restartCount": round}), &waits] {
                report_containers(&mut api_server, "pair-00002", &running(0), state);
                assert_eq!(condition_without_traffic(&api_server), exit_reason);
            }
            advance_time(&mut api_server, 10_000);
            assert_eq!(condition_without_traffic(&api_server), exit_reason);
        }
        // A new leader has not observed the crash.
        api_server.other_replica = None;
        api_server.machine = machine().loading();
        for event in observations(&api_server.objects, &[]) {
            api_server.step(event);
        }
        api_server.step(ControllerEvent::InitialListSynced);
        api_server.report_all_ready();
        api_server.step(ControllerEvent::LeadershipChanged(true));
        report_containers(&mut api_server, "pair-00002", &running(0), &running(20));
        assert_eq!(ready_condition(&api_server, "pair-00002"), exit_reason);
        // This time the container stays.
        advance_time(&mut api_server, 5000);
        assert_eq!(ready_condition(&api_server, "pair-00002"), "True : ");
        assert_eq!(targets(&api_server, "pair"), ["pair-00002"]);
    }
}

/// A container that runs for more than five seconds proves its Revision once. From then on it must run twice as long as
/// before.
#[test]
fn a_container_that_ends_again_and_again_must_run_longer_each_time() {
    let mut api_server = FakeApiServer::new();
    apply_service_with_sidecar(&mut api_server, "pair");
    let ended = json!({"terminated": {"exitCode": 1, "message": "out of luck"}});
    let exit_reason = "False ExitCode1: Container failed with: out of luck";
    let run = |api_server: &mut FakeApiServer, restarts: u32, seconds: u64| {
        report_containers(api_server, "pair-00001", &running(0), &running(restarts));
        api_server.report_all_ready();
        (0..seconds).for_each(|_| advance_time(api_server, 1000));
        ready_condition(api_server, "pair-00001")
    };
    let end = |api_server: &mut FakeApiServer, restarts: u32| {
        let state = json!({"state": ended, "restartCount": restarts});
        report_containers(api_server, "pair-00001", &running(0), &state);
        assert_eq!(ready_condition(api_server, "pair-00001"), exit_reason, "{restarts}");
        advance_time(api_server, 10_000);
    };
    assert_eq!(run(&mut api_server, 0, 8), "True : ");
    end(&mut api_server, 0);
    for restarts in 1..10 {
        assert_eq!(run(&mut api_server, restarts, 8), exit_reason, "{restarts}");
        end(&mut api_server, restarts);
    }
    assert_eq!(run(&mut api_server, 10, 16), "True : ");
    // An end after ten minutes is no sign of another one soon.
    assert_eq!(run(&mut api_server, 10, 600), "True : ");
    end(&mut api_server, 10);
    assert_eq!(run(&mut api_server, 11, 5), "True : ");
}

/// Returns the only pod of the service.
fn only_pod(api_server: &FakeApiServer) -> NamespacedName {
    let mut pods =
        api_server.names(ResourceKind::Pod).into_iter().filter(|it| it.namespace == NAMESPACE);
    pods.next().expect("a pod")
}

/// Reports the only pod as ready or not, as its agent does.
fn report_only_pod(api_server: &mut FakeApiServer, ready: bool) {
    let pod = (ResourceKind::Pod, only_pod(api_server));
    let uid = api_server.objects[&pod]["metadata"]["uid"].as_str().expect("a uid").to_owned();
    let reporter =
        ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
    let observation = PodObservation { uid, ready, ..ready_observation() };
    api_server.step(ControllerEvent::PodReported { reporter, stream: 1, observation });
}

/// Sets the condition `Ready` of the only pod, as the kubelet does after the probes of all containers.
fn report_kubelet_readiness(api_server: &mut FakeApiServer, ready: bool) {
    let pod = only_pod(api_server);
    let at = (ResourceKind::Pod, pod.clone());
    let mut object = api_server.objects[&at].clone();
    let status = if ready { "True" } else { "False" };
    object["status"]["conditions"] = json!([{"type": "Ready", "status": status}]);
    api_server.objects.insert(at, object.clone());
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: pod,
        object: Some(Box::new(object)),
    });
}

#[test]
fn a_pod_with_an_exec_probe_needs_its_listener_and_the_kubelets_readiness() {
    for kubelet_first in [true, false] {
        let mut api_server = FakeApiServer::new();
        let mut template = template("hello:v1", 1);
        template["spec"]["containers"][0]["readinessProbe"] =
            json!({"exec": {"command": ["true"]}});
        api_server.apply_as_user(
            ResourceKind::KnativeService,
            "hello",
            json!({"template": template}),
        );
        let steps: [fn(&mut FakeApiServer); 2] = if kubelet_first {
            [|it| report_kubelet_readiness(it, true), FakeApiServer::report_all_ready]
        } else {
            [FakeApiServer::report_all_ready, |it| report_kubelet_readiness(it, true)]
        };
        report_only_pod(&mut api_server, false);
        let starting = [common::wire::RoutingPhase::Starting];
        assert_eq!(phases(&api_server), starting);
        assert_eq!(awaited_reports(&api_server), [false], "the kubelet runs the probe");
        steps[0](&mut api_server);
        assert_eq!(phases(&api_server), starting, "kubelet first: {kubelet_first}");
        steps[1](&mut api_server);
        assert_eq!(phases(&api_server), [common::wire::RoutingPhase::Ready]);
        report_kubelet_readiness(&mut api_server, false);
        assert_ne!(phases(&api_server), [common::wire::RoutingPhase::Ready], "the command fails");
    }
}
