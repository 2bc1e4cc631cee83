//! Pods that stand by on Kubernetes: what is written, and what other replicas and later leaders make of it.

use std::time::Duration;

use common::wire::{StandbyOrder, StandbyReport};

use super::*;

mod resizes;

/// Applies the service `hello` with an initial scale of 0 and this number of pods on standby.
fn apply_with_standby(api_server: &mut FakeApiServer, pods: &str) {
    let mut template = template("hello:v1", 0);
    template["metadata"]["annotations"][key::STANDBY] = json!(pods);
    api_server.apply_as_user(ResourceKind::KnativeService, "hello", json!({"template": template}));
}

fn agent() -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() }
}

fn begin_stream(api_server: &mut FakeApiServer) {
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
}

fn report(api_server: &mut FakeApiServer, uid: &str, standby: Option<StandbyReport>) {
    let observation = PodObservation { uid: uid.into(), standby, ..ready_observation() };
    api_server.step(ControllerEvent::PodReported { reporter: agent(), stream: 1, observation });
}

fn frozen() -> Option<StandbyReport> {
    Some(StandbyReport { is_frozen: true, ..StandbyReport::default() })
}

/// Returns a sleeping service with one frozen pod, and the name and UID of the pod.
fn frozen_service() -> (FakeApiServer, NamespacedName, String) {
    let mut api_server = FakeApiServer::new();
    begin_stream(&mut api_server);
    apply_with_standby(&mut api_server, "1");
    let (pod, uid) = pods(&api_server).remove(0);
    report(&mut api_server, &uid, None);
    report(&mut api_server, &uid, frozen());
    (api_server, pod, uid)
}

/// Returns the names of the annotations of a pod by which the leader passes its state.
fn marks(api_server: &FakeApiServer, pod: &NamespacedName) -> Vec<&'static str> {
    let annotations = &api_server.object(ResourceKind::Pod, &pod.name)["metadata"]["annotations"];
    let all = [key::DRAINING, key::STANDBY_SINCE].into_iter();
    all.filter(|it| annotations.get(*it).is_some()).collect()
}

/// Passes the pod to all replicas as the API server holds it.
fn observe_pod(api_server: &mut FakeApiServer, pod: &NamespacedName) {
    let object = api_server.object(ResourceKind::Pod, &pod.name).clone();
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Pod,
        name: pod.clone(),
        object: Some(Box::new(object)),
    });
}

fn has_order(api_server: &FakeApiServer, uid: &str) -> bool {
    api_server.table().pods[uid].standby.is_some()
}

fn standby_condition(api_server: &FakeApiServer) -> String {
    api_server.condition(ResourceKind::Revision, "hello-00001", "StandbyAvailable")
}

fn advance(api_server: &mut FakeApiServer, ms: u64) {
    api_server.now = api_server.now.plus_ms(ms);
    api_server.step(ControllerEvent::Tick);
}

/// Makes a replica that has just started the leader. No agent has a stream to it yet.
fn start_new_leader(api_server: &mut FakeApiServer) {
    (api_server.machine, api_server.other_replica) = (api_server.start_replica(), None);
    api_server.step(ControllerEvent::LeadershipChanged(true));
}

fn set_namespace_default(api_server: &mut FakeApiServer, pods: Option<&str>) {
    let annotations = pods.map_or_else(|| json!({}), |pods| json!({(key::STANDBY): pods}));
    let object = json!({"metadata": {"name": NAMESPACE, "annotations": annotations}});
    api_server.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::Namespace,
        name: NamespacedName::new("", NAMESPACE),
        object: Some(Box::new(object)),
    });
}

/// The model compares the tables of two replicas after each event.
#[test]
fn the_order_of_a_pod_is_noted_on_it_for_other_replicas() {
    let (mut api_server, pod, uid) = frozen_service();
    assert_eq!(
        (marks(&api_server, &pod), requested_replicas(&api_server)),
        (vec![key::STANDBY_SINCE], &json!(1))
    );
    assert!(has_order(&api_server, &uid));
    api_server.decide("hello-00001", 1);
    assert_eq!((marks(&api_server, &pod), has_order(&api_server, &uid)), (vec![], false));
    api_server.decide("hello-00001", 0);
    assert_eq!(marks(&api_server, &pod), [key::STANDBY_SINCE]);
    assert!(has_order(&api_server, &uid));
}

/// A process of `kubectl debug` is the first one of a container, so the agent does not take it for a session.
#[test]
fn a_pod_with_a_debug_container_runs_until_the_container_has_ended() {
    let (mut api_server, pod, uid) = frozen_service();
    for (state, has_order_then) in [("waiting", false), ("running", false), ("terminated", true)] {
        let at = (ResourceKind::Pod, pod.clone());
        let object = api_server.objects.get_mut(&at).expect("a pod");
        object["spec"]["ephemeralContainers"] = json!([{"name": "debugger"}]);
        object["status"]["ephemeralContainerStatuses"] =
            json!([{"name": "debugger", "state": {state: {}}}]);
        observe_pod(&mut api_server, &pod);
        let marks_then = if has_order_then { vec![key::STANDBY_SINCE] } else { vec![] };
        assert_eq!(
            (phases(&api_server), has_order(&api_server, &uid), marks(&api_server, &pod)),
            (vec![Ready], has_order_then, marks_then),
            "{state}"
        );
        assert_eq!(requested_replicas(&api_server), &json!(1), "{state}");
    }
}

#[test]
fn a_pod_autoscaler_shows_frozen_pods_and_others_have_no_such_number() {
    let standby_scale = |api_server: &FakeApiServer, revision: &str| {
        api_server.object(ResourceKind::PodAutoscaler, revision)["status"]["standbyScale"].clone()
    };
    let (mut api_server, _, uid) = frozen_service();
    assert_eq!(standby_scale(&api_server, "hello-00001"), 1);
    assert_eq!(standby_condition(&api_server), "True : ");
    let writes = api_server.writes;
    // A probe thaws the pod for a moment.
    report(&mut api_server, &uid, Some(StandbyReport::default()));
    report(&mut api_server, &uid, frozen());
    assert_eq!(api_server.writes, writes, "it is no change for users");
    api_server.decide("hello-00001", 1);
    assert_eq!(standby_scale(&api_server, "hello-00001"), 0);
    api_server.apply_service("other", "hello:v1", 0, Value::Null);
    assert_eq!(standby_scale(&api_server, "other-00001"), Value::Null);
}

#[test]
fn connections_of_nodes_without_agents_lead_to_pods_that_stand_by() {
    let (mut api_server, _, _) = frozen_service();
    let asleep = common::wire::ScaleDecision {
        connection_path: ConnectionPath::Activator,
        ..decision("hello-00001", 0)
    };
    api_server.step(ControllerEvent::DecisionReceived(asleep));
    let spec = &api_server.object(ResourceKind::ServerlessService, "hello-00001")["spec"];
    assert_eq!(spec["mode"], "Serve");
}

#[test]
fn a_new_leader_keeps_pods_that_stand_by_without_a_decision() {
    let (mut api_server, pod, uid) = frozen_service();
    start_new_leader(&mut api_server);
    assert_eq!((requested_replicas(&api_server), has_order(&api_server, &uid)), (&json!(1), true));
    begin_stream(&mut api_server);
    report(&mut api_server, &uid, frozen());
    assert_eq!(
        (phases(&api_server), marks(&api_server, &pod)),
        (vec![Ready], vec![key::STANDBY_SINCE])
    );
    advance(&mut api_server, 60_000);
    assert_eq!((phases(&api_server), has_order(&api_server, &uid)), (vec![Ready], true));
}

/// The kubelet reports the pod as ready: without its agent it is frozen all the same.
#[test]
fn a_new_leader_waits_for_the_agents_before_it_takes_frozen_pods_for_lost() {
    let (mut api_server, pod, uid) = frozen_service();
    let mut object = api_server.object(ResourceKind::Pod, &pod.name).clone();
    object["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    api_server.objects.insert((ResourceKind::Pod, pod), object);
    start_new_leader(&mut api_server);
    assert_eq!(phases(&api_server), [Ready]);
    advance(&mut api_server, 4999);
    assert_eq!(phases(&api_server), [Ready]);
    advance(&mut api_server, 1);
    assert_eq!((phases(&api_server), has_order(&api_server, &uid)), (vec![Starting], true));
    begin_stream(&mut api_server);
    assert_eq!(phases(&api_server), [Ready]);
}

#[test]
fn an_order_of_a_clock_that_is_ahead_begins_when_it_is_read() {
    let (mut api_server, pod, uid) = frozen_service();
    let ahead = api_server.now.plus_ms(3_600_000).rfc3339();
    let at = (ResourceKind::Pod, pod);
    api_server.objects.get_mut(&at).expect("a pod")["metadata"]["annotations"]
        [key::STANDBY_SINCE] = json!(ahead);
    let now = api_server.now;
    start_new_leader(&mut api_server);
    let mut pods = api_server.machine.cluster().apps[&name("hello")].pods();
    let (_, pod) = pods.find(|(_, pod)| *pod.uid == *uid).expect("the pod");
    assert_eq!(pod.standby_since, Some(now));
}

#[test]
fn a_failed_freeze_has_an_event_and_a_condition_that_outlives_its_leader() {
    let (mut api_server, pod, uid) = frozen_service();
    let failure =
        || Some(StandbyReport { failure: "no freezer".into(), ..StandbyReport::default() });
    let message = format!("Pod {} cannot be frozen: no freezer", pod.name);
    for _ in 0..2 {
        report(&mut api_server, &uid, failure());
    }
    let [event] = &api_server.object_events[..] else { panic!("{:?}", api_server.object_events) };
    assert_eq!(
        (event.resource, &event.name, &*event.reason, &event.message, event.is_warning),
        (ResourceKind::Revision, &name("hello-00001"), "FreezeFailed", &message, true)
    );
    let condition = format!("False FreezeFailed: {message}");
    assert_eq!(standby_condition(&api_server), condition);
    assert_eq!(
        (phases(&api_server), marks(&api_server, &pod)),
        (vec![Draining], vec![key::DRAINING])
    );
    // The activator reports nothing, so it is waited for.
    advance(&mut api_server, 1000);
    api_server.step(ControllerEvent::DrainAcked {
        reporter: agent(),
        stream: 1,
        pod_uid: uid.clone(),
    });
    api_server.report_all_drained();
    assert_eq!((requested_replicas(&api_server), pods(&api_server).len()), (&json!(0), 0));
    start_new_leader(&mut api_server);
    begin_stream(&mut api_server);
    assert_eq!(
        (requested_replicas(&api_server), standby_condition(&api_server)),
        (&json!(0), condition)
    );
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    assert_eq!(standby_condition(&api_server), "True : ");
    api_server.decide("hello-00001", 0);
    let (pod, _) = pods(&api_server).remove(0);
    assert_eq!(marks(&api_server, &pod), [key::STANDBY_SINCE], "a wake has ended it");
    assert_eq!(api_server.object_events.len(), 1);
}

#[test]
fn a_namespace_and_the_installation_have_defaults_of_standby() {
    let mut api_server = FakeApiServer::new();
    begin_stream(&mut api_server);
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    let number = |api_server: &FakeApiServer| pods(api_server).len();
    assert_eq!(number(&api_server), 0);
    api_server.set_config_map("config-autoscaler", json!({"standby": "2"}));
    assert_eq!((number(&api_server), requested_replicas(&api_server)), (2, &json!(2)));
    set_namespace_default(&mut api_server, Some("1"));
    assert_eq!(requested_replicas(&api_server), 1, "the namespace counts before");
    set_namespace_default(&mut api_server, Some("many"));
    assert_eq!(requested_replicas(&api_server), 2);
    assert_eq!(
        standby_condition(&api_server),
        "False InvalidDefault: The annotation rouse.dev/standby of the namespace has no effect: \
         \"many\" is no number from 0 to 10"
    );
    set_namespace_default(&mut api_server, Some("0"));
    assert_eq!(requested_replicas(&api_server), 0);
    assert_eq!(standby_condition(&api_server), "True NotRequested: No pods are to stand by.");
    set_namespace_default(&mut api_server, None);
    assert_eq!(requested_replicas(&api_server), 2);
    let mut own = template("hello:v1", 0);
    own["metadata"]["annotations"][key::STANDBY] = json!("0");
    api_server.apply_as_user(ResourceKind::KnativeService, "own", json!({"template": own}));
    let deployment = api_server.object(ResourceKind::Deployment, "own-00001-deployment");
    assert_eq!(deployment["spec"]["replicas"], 0, "the template counts first");
}

/// Clients' nodes and activators pass a pod over by the timeout of its order.
#[test]
fn the_order_of_a_frozen_pod_follows_the_timeout_of_the_installation() {
    let (mut api_server, _, uid) = frozen_service();
    let timeout = |api_server: &FakeApiServer| {
        api_server.table().pods[&uid].standby.map(|order| order.agent_timeout)
    };
    assert_eq!(timeout(&api_server), Some(StandbyOrder::DEFAULT_AGENT_TIMEOUT));
    let one_second = json!({"standby-agent-timeout": "1s"});
    api_server.set_config_map("config-autoscaler", one_second);
    assert_eq!(timeout(&api_server), Some(Duration::from_secs(1)));
}

/// Kubernetes replaces a pod that a user has deleted.
#[test]
fn a_replaced_pod_stands_by_as_the_one_before() {
    let (mut api_server, pod, _) = frozen_service();
    api_server.delete_as_user(ResourceKind::Pod, &pod.name);
    let deployment = name("hello-00001-deployment");
    // The model of the Deployment's controller runs when the number changes.
    for replicas in [0, 1] {
        for event in api_server.scale(&deployment, replicas, &[]) {
            api_server.step(event);
        }
    }
    let (new, uid) = pods(&api_server).remove(0);
    assert_ne!(new, pod);
    assert!(has_order(&api_server, &uid));
    assert_eq!(marks(&api_server, &new), [key::STANDBY_SINCE]);
}
