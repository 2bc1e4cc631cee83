//! Requests of pods that stand by: reduced, restored and refused.

use super::*;
use crate::model::object::WriteError;

/// Returns a service with one pod on standby that has requests and is not frozen yet.
fn service_with_requests() -> (FakeApiServer, NamespacedName, String) {
    let mut api_server = FakeApiServer::new();
    begin_stream(&mut api_server);
    apply_with_standby(&mut api_server, "1");
    let (pod, uid) = pods(&api_server).remove(0);
    let object = api_server.objects.get_mut(&(ResourceKind::Pod, pod.clone())).expect("a pod");
    object["spec"]["containers"] =
        json!([{"name": "user-container", "resources": {"requests": original()}}]);
    object["metadata"]["generation"] = json!(1);
    observe_pod(&mut api_server, &pod);
    report(&mut api_server, &uid, None);
    (api_server, pod, uid)
}

fn frozen_service_with_requests() -> (FakeApiServer, NamespacedName, String) {
    let (mut api_server, pod, uid) = service_with_requests();
    freeze(&mut api_server, &uid, 20);
    assert_eq!(requests(&api_server, &pod), json!({"cpu": "1m", "memory": "20Mi"}));
    (api_server, pod, uid)
}

/// Reports the pod as frozen, with this memory.
fn freeze(api_server: &mut FakeApiServer, uid: &str, memory_mib: u64) {
    let memory_bytes = Some(memory_mib << 20);
    let standby = StandbyReport { is_frozen: true, memory_bytes, failure: String::new() };
    report(api_server, uid, Some(standby));
}

/// Reports that a request has thawed the pod.
fn thaw(api_server: &mut FakeApiServer, uid: &str) {
    let standby = Some(StandbyReport::default());
    let observation =
        PodObservation { uid: uid.into(), standby, in_flight: 1, ..ready_observation() };
    api_server.step(ControllerEvent::PodReported { reporter: agent(), stream: 1, observation });
}

fn requests(api_server: &FakeApiServer, pod: &NamespacedName) -> Value {
    let object = api_server.object(ResourceKind::Pod, &pod.name);
    object["spec"]["containers"][0]["resources"]["requests"].clone()
}

fn original() -> Value {
    json!({"cpu": "500m", "memory": "256Mi"})
}

fn is_noted(api_server: &FakeApiServer, pod: &NamespacedName) -> bool {
    let object = api_server.object(ResourceKind::Pod, &pod.name);
    object["metadata"]["annotations"].get(key::ORIGINAL_REQUESTS).is_some()
}

/// Sets or removes the condition of a resize that the kubelet has not allocated.
fn set_pending(api_server: &mut FakeApiServer, pod: &NamespacedName, reason: Option<&str>) {
    let at = (ResourceKind::Pod, pod.clone());
    let object = api_server.objects.get_mut(&at).expect("a pod");
    let condition = reason.map(|reason| {
        json!({
            "type": "PodResizePending", "status": "True", "reason": reason, "message": "Node is full",
            "observedGeneration": object["metadata"]["generation"],
        })
    });
    object["status"]["conditions"] = condition.into_iter().collect();
    observe_pod(api_server, pod);
}

#[test]
fn a_frozen_pod_gives_requests_back_and_a_request_restores_them() {
    let (mut api_server, pod, uid) = service_with_requests();
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
    freeze(&mut api_server, &uid, 20);
    assert_eq!(requests(&api_server, &pod), json!({"cpu": "1m", "memory": "20Mi"}));
    assert!(is_noted(&api_server, &pod));
    assert_eq!(marks(&api_server, &pod), [key::STANDBY_SINCE], "the note is one more annotation");
    freeze(&mut api_server, &uid, 8);
    assert_eq!(requests(&api_server, &pod), json!({"cpu": "1m", "memory": "8Mi"}), "reclaimed");
    // A probe thaws the pod for a moment.
    let writes = api_server.writes;
    report(&mut api_server, &uid, Some(StandbyReport::default()));
    freeze(&mut api_server, &uid, 8);
    assert_eq!(api_server.writes, writes);
    // The autoscaler has not decided yet, or is gone.
    thaw(&mut api_server, &uid);
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
    freeze(&mut api_server, &uid, 20);
    assert_eq!(requests(&api_server, &pod), json!({"cpu": "1m", "memory": "20Mi"}));
    api_server.decide("hello-00001", 1);
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
}

#[test]
fn the_switch_of_operators_is_followed_at_once() {
    let (mut api_server, pod, uid) = frozen_service_with_requests();
    api_server.set_config_map("config-autoscaler", json!({"standby-resize": "false"}));
    // Apps follow a setting some at a time.
    advance(&mut api_server, 1000);
    freeze(&mut api_server, &uid, 20);
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
}

/// The successor may need what the pod has given back.
#[test]
fn a_pod_that_ends_is_not_resized_any_more() {
    let (mut api_server, pod, uid) = frozen_service_with_requests();
    let reduced = requests(&api_server, &pod);
    let failure = StandbyReport { failure: "no freezer".into(), ..StandbyReport::default() };
    report(&mut api_server, &uid, Some(failure));
    assert_eq!(phases(&api_server), [Draining]);
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (reduced, true));
}

#[test]
fn a_new_leader_keeps_reduced_requests_until_agents_report_and_restores_them_after() {
    let (mut api_server, pod, uid) = frozen_service_with_requests();
    let reduced = requests(&api_server, &pod);
    start_new_leader(&mut api_server);
    assert_eq!(requests(&api_server, &pod), reduced, "no agent has a stream yet");
    begin_stream(&mut api_server);
    report(&mut api_server, &uid, None);
    assert_eq!(requests(&api_server, &pod), reduced, "the agent does not know the order yet");
    freeze(&mut api_server, &uid, 20);
    assert_eq!(requests(&api_server, &pod), reduced);
    thaw(&mut api_server, &uid);
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
}

/// The agent thaws its pods before it stops and at its start, and freezes them again once it has their orders.
#[test]
fn a_restart_of_the_agent_changes_no_requests() {
    let (mut api_server, pod, uid) = frozen_service_with_requests();
    let (reduced, writes) = (requests(&api_server, &pod), api_server.writes);
    report(&mut api_server, &uid, Some(StandbyReport::default()));
    api_server.step(ControllerEvent::ReportStreamEnd { reporter: agent(), stream: 1 });
    api_server.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 2 });
    for standby in [None, Some(StandbyReport::default()), frozen()] {
        let observation = PodObservation { uid: uid.clone(), standby, ..ready_observation() };
        api_server.step(ControllerEvent::PodReported { reporter: agent(), stream: 2, observation });
        assert_eq!((requests(&api_server, &pod), api_server.writes), (reduced.clone(), writes));
    }
    let observation = PodObservation { uid, in_flight: 1, ..ready_observation() };
    api_server.step(ControllerEvent::PodReported { reporter: agent(), stream: 2, observation });
    assert_eq!(requests(&api_server, &pod), reduced, "an agent that does not know the order yet");
}

#[test]
fn a_new_leader_restores_the_requests_of_a_pod_without_an_order() {
    let (mut api_server, pod, _) = frozen_service_with_requests();
    let refusal = WriteError { reason: "RequestsNotRestored", message: "no answer".into() };
    api_server.resize_refusal = Some(refusal);
    api_server.decide("hello-00001", 1);
    assert!(is_noted(&api_server, &pod));
    api_server.resize_refusal = None;
    start_new_leader(&mut api_server);
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
}

/// The pod stays frozen: it only keeps more than it needs.
#[test]
fn a_refused_reduction_is_explained_and_changes_nothing_else() {
    let (mut api_server, pod, uid) = service_with_requests();
    let message = "minimum cpu usage per Container is 10m".to_owned();
    let refusal = WriteError { reason: "RequestsNotReduced", message: message.clone() };
    api_server.resize_refusal = Some(refusal);
    freeze(&mut api_server, &uid, 20);
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
    assert!(has_order(&api_server, &uid));
    let expected = format!(
        "True RequestsNotReduced: Pod {} keeps requests while it is frozen: {message}",
        pod.name
    );
    assert_eq!(standby_condition(&api_server), expected);
    assert!(api_server.object_events.is_empty(), "the Event of the write is on the pod");
    let writes = api_server.writes;
    for _ in 0..3 {
        freeze(&mut api_server, &uid, 20);
    }
    assert_eq!(api_server.writes, writes, "no further attempt");
}

#[test]
fn a_node_that_cannot_change_memory_is_asked_for_cpu_alone() {
    let (mut api_server, pod, uid) = frozen_service_with_requests();
    set_pending(&mut api_server, &pod, Some("Infeasible"));
    assert_eq!(requests(&api_server, &pod), json!({"cpu": "1m", "memory": "256Mi"}));
    // The kubelet has not seen the new requests yet.
    observe_pod(&mut api_server, &pod);
    assert_eq!(requests(&api_server, &pod), json!({"cpu": "1m", "memory": "256Mi"}));
    set_pending(&mut api_server, &pod, Some("Infeasible"));
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
    assert!(has_order(&api_server, &uid));
    set_pending(&mut api_server, &pod, None);
    assert!(has_order(&api_server, &uid));
}

#[test]
fn a_node_without_room_for_a_thawed_pod_ends_its_standby_with_an_event() {
    let (mut api_server, pod, uid) = frozen_service_with_requests();
    api_server.decide("hello-00001", 1);
    set_pending(&mut api_server, &pod, Some("Deferred"));
    let message =
        format!("Pod {} does not get its requests back: Deferred: Node is full", pod.name);
    let condition = format!("False RequestsNotRestored: {message}");
    assert_eq!(standby_condition(&api_server), condition);
    let [event] = &api_server.object_events[..] else { panic!("{:?}", api_server.object_events) };
    assert_eq!(
        (event.resource, &*event.reason, &event.message, event.is_warning),
        (ResourceKind::Revision, "RequestsNotRestored", &message, true)
    );
    assert_eq!(phases(&api_server), [Ready], "it serves, and load adds pods elsewhere");
    // It has room again, but may have none after the next wake.
    set_pending(&mut api_server, &pod, None);
    api_server.decide("hello-00001", 0);
    assert_eq!((phases(&api_server), has_order(&api_server, &uid)), (vec![Draining], false));
    assert_eq!(api_server.object_events.len(), 1);
}

#[test]
fn a_refused_restoration_is_tried_until_it_succeeds() {
    let (mut api_server, pod, _) = frozen_service_with_requests();
    let refusal = WriteError { reason: "RequestsNotRestored", message: "exceeded quota".into() };
    api_server.resize_refusal = Some(refusal);
    api_server.decide("hello-00001", 1);
    let condition = format!(
        "False RequestsNotRestored: Pod {} does not get its requests back: exceeded quota",
        pod.name
    );
    assert_eq!(standby_condition(&api_server), condition);
    api_server.resize_refusal = None;
    let key = ObjectPartKey::new(ResourceKind::Pod, ObjectPart::Resize, pod.clone());
    for event in api_server.write(&key) {
        api_server.step(event);
    }
    assert_eq!((requests(&api_server, &pod), is_noted(&api_server, &pod)), (original(), false));
}
