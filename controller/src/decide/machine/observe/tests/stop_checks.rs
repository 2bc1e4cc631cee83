//! Stop checks: pods whose kubelets ask to stop a container, and the API server's answers about these pods.

use super::*;
use crate::decide::machine::{PodRead, PodReadResult};

/// Returns a service with one ready pod, and the name and UID of the pod.
fn service_with_a_pod() -> (FakeApiServer, NamespacedName, String) {
    let mut api_server = FakeApiServer::new();
    api_server.apply_service("hello", "hello:v1", 0, Value::Null);
    api_server.decide("hello-00001", 1);
    api_server.report_all_ready();
    let (pod, uid) = pods(&api_server).remove(0);
    (api_server, pod, uid)
}

/// Reports a pod with a request in flight, which its kubelet asks to stop, or which is ready.
pub(super) fn report_stop(api_server: &mut FakeApiServer, uid: &str, awaits_stop: bool) {
    let reporter =
        ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() };
    let observation = PodObservation {
        uid: uid.into(),
        ready: !awaits_stop,
        in_flight: 1,
        awaits_stop,
        ..ready_observation()
    };
    api_server.step(ControllerEvent::PodReported { reporter, stream: 1, observation });
}

/// Takes the reads that are to be made. Each replica asks for itself.
pub(super) fn take_reads(api_server: &mut FakeApiServer) -> Vec<PodRead> {
    let reads = std::mem::take(&mut api_server.pod_reads);
    assert_eq!(std::mem::take(&mut api_server.pod_reads_of_other), reads);
    reads
}

/// Takes the only read that is to be made.
pub(super) fn take_read(api_server: &mut FakeApiServer) -> PodRead {
    let mut reads = take_reads(api_server);
    assert_eq!(reads.len(), 1, "{reads:?}");
    reads.remove(0)
}

pub(super) fn answer(api_server: &mut FakeApiServer, read: &PodRead, result: PodReadResult) {
    api_server.step(ControllerEvent::PodReadEnded { read: read.clone(), result });
}

/// Answers a read with the object that has the pod's name.
pub(super) fn answer_with_object(api_server: &mut FakeApiServer, read: &PodRead) {
    let object = api_server.objects[&(ResourceKind::Pod, read.name.clone())].clone();
    answer(api_server, read, PodReadResult::Found(Box::new(object)));
}

/// Changes a pod while the watches of all replicas are silent.
fn change_unobserved(
    api_server: &mut FakeApiServer,
    pod: &NamespacedName,
    change: impl FnOnce(&mut Value),
) {
    change(api_server.objects.get_mut(&(ResourceKind::Pod, pod.clone())).expect("a pod"));
}

/// Lets the watches bring a pod.
fn observe(api_server: &mut FakeApiServer, pod: &NamespacedName, object: Value) {
    let (resource, name, object) = (ResourceKind::Pod, pod.clone(), Some(Box::new(object)));
    api_server.step(ControllerEvent::ObjectObserved { resource, name, object });
}

fn advance_ms(api_server: &mut FakeApiServer, ms: u64) {
    api_server.now = api_server.now.plus_ms(ms);
    api_server.step(ControllerEvent::Tick);
}

/// Returns the phase of a pod in the RouteTable, and true if a container of the pod restarts.
fn statement(api_server: &FakeApiServer, uid: &str) -> Option<(common::wire::RoutingPhase, bool)> {
    api_server.table().pods.get(uid).map(|pod| (pod.phase, pod.container_restarts))
}

#[test]
fn a_pod_that_is_not_being_deleted_restarts_a_container_for_as_long_as_its_agent_says_so() {
    let (mut api_server, pod, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let first = take_read(&mut api_server);
    assert_eq!((&first.name, &first.uid), (&pod, &uid));
    report_stop(&mut api_server, &uid, true);
    assert_eq!(statement(&api_server, &uid), Some((Starting, false)), "no answer yet");
    answer_with_object(&mut api_server, &first);
    assert_eq!(statement(&api_server, &uid), Some((Starting, true)));
    advance_ms(&mut api_server, 20_000);
    assert_eq!(take_reads(&mut api_server), [], "it is asked once");
    report_stop(&mut api_server, &uid, false);
    assert_eq!(statement(&api_server, &uid), Some((Ready, false)));

    // The next request may be for the end of the pod, of which the first answer tells nothing.
    report_stop(&mut api_server, &uid, true);
    let second = take_read(&mut api_server);
    answer_with_object(&mut api_server, &first);
    assert_eq!(statement(&api_server, &uid), Some((Starting, false)));
    answer_with_object(&mut api_server, &second);
    assert_eq!(statement(&api_server, &uid), Some((Starting, true)));
}

#[test]
fn a_pod_that_was_deleted_while_the_watch_was_silent_drains() {
    let (mut api_server, pod, uid) = service_with_a_pod();
    let deleted_at = api_server.now.rfc3339();
    change_unobserved(&mut api_server, &pod, |it| {
        it["metadata"]["deletionTimestamp"] = json!(deleted_at);
    });
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    answer_with_object(&mut api_server, &read);
    assert_eq!(statement(&api_server, &uid), Some((Draining, false)));
    report_stop(&mut api_server, &uid, true);
    advance_ms(&mut api_server, 20_000);
    assert_eq!(take_reads(&mut api_server), [], "its end is known");
}

#[test]
fn a_pod_that_is_not_there_any_more_or_has_failed_leaves_the_table() {
    let (mut api_server, pod, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    api_server.objects.remove(&(ResourceKind::Pod, pod));
    answer(&mut api_server, &read, PodReadResult::NotFound);
    assert_eq!(statement(&api_server, &uid), None);
    assert!(!api_server.machine.cluster().pods.reports.contains_key(&uid));

    let (mut api_server, pod, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    change_unobserved(&mut api_server, &pod, |it| it["status"]["phase"] = json!("Failed"));
    answer_with_object(&mut api_server, &read);
    assert_eq!(statement(&api_server, &uid), None);
    advance_ms(&mut api_server, 20_000);
    assert_eq!(take_reads(&mut api_server), []);
}

#[test]
fn a_read_is_repeated_after_a_failure_and_without_an_answer() {
    let (mut api_server, _, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    answer(&mut api_server, &read, PodReadResult::Failed);
    assert_eq!(statement(&api_server, &uid), Some((Starting, false)), "a failure tells nothing");
    for pause_ms in [1000, 5000, 5000] {
        advance_ms(&mut api_server, pause_ms - 1);
        assert_eq!(take_reads(&mut api_server), [], "{pause_ms}");
        advance_ms(&mut api_server, 1);
        assert_eq!(take_read(&mut api_server), read, "{pause_ms}");
    }
    answer_with_object(&mut api_server, &read);
    assert_eq!(statement(&api_server, &uid), Some((Starting, true)));
    // The answers to the other reads come late.
    answer(&mut api_server, &read, PodReadResult::Failed);
    advance_ms(&mut api_server, 20_000);
    assert_eq!(take_reads(&mut api_server), []);
    assert_eq!(statement(&api_server, &uid), Some((Starting, true)));
}

#[test]
fn another_pod_with_the_name_takes_the_place_of_the_one_that_was_asked_about() {
    let (mut api_server, pod, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    let other = "00000000-0000-4000-9000-00000000ffff";
    change_unobserved(&mut api_server, &pod, |it| it["metadata"]["uid"] = json!(other));
    answer_with_object(&mut api_server, &read);
    assert_eq!(statement(&api_server, &uid), None);
    assert_eq!(statement(&api_server, other), Some((Starting, false)));
}

/// The kubelet may end a pod that is not deleted, for lack of memory for example. It sets the condition before.
#[test]
fn a_pod_that_is_about_to_be_disrupted_does_not_only_restart_a_container() {
    let (mut api_server, pod, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    let conditions = |status: &str| json!([{"type": "DisruptionTarget", "status": status}]);
    change_unobserved(&mut api_server, &pod, |it| it["status"]["conditions"] = conditions("True"));
    answer_with_object(&mut api_server, &read);
    assert_eq!(statement(&api_server, &uid), Some((Starting, false)));
    advance_ms(&mut api_server, 20_000);
    assert_eq!(take_reads(&mut api_server), []);
    // It was not to be after all.
    change_unobserved(&mut api_server, &pod, |it| it["status"]["conditions"] = conditions("False"));
    let object = api_server.objects[&(ResourceKind::Pod, pod.clone())].clone();
    observe(&mut api_server, &pod, object);
    assert_eq!(statement(&api_server, &uid), Some((Starting, true)));
}

#[test]
fn an_answer_after_the_kubelets_request_is_over_has_no_effect() {
    let (mut api_server, _, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    report_stop(&mut api_server, &uid, false);
    answer_with_object(&mut api_server, &read);
    assert_eq!(statement(&api_server, &uid), Some((Ready, false)));
    advance_ms(&mut api_server, 20_000);
    assert_eq!(take_reads(&mut api_server), []);
}

#[test]
fn a_pod_that_serves_again_is_asked_about_again() {
    let (mut api_server, _, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let first = take_read(&mut api_server);
    api_server.decide("hello-00001", 0);
    assert_eq!(statement(&api_server, &uid), Some((Draining, false)));
    answer_with_object(&mut api_server, &first);
    assert_eq!(statement(&api_server, &uid), Some((Draining, false)));
    api_server.decide("hello-00001", 1);
    assert_eq!(statement(&api_server, &uid), Some((Starting, false)));
    let second = take_read(&mut api_server);
    answer_with_object(&mut api_server, &second);
    assert_eq!(statement(&api_server, &uid), Some((Starting, true)));
}

/// Sets the version of an object, which the API server raises with each change.
fn set_version(object: &mut Value, version: u32) {
    object["metadata"]["resourceVersion"] = json!(version.to_string());
}

#[test]
fn an_answer_that_is_older_than_the_watch_changes_nothing_of_the_pod() {
    let (mut api_server, pod, uid) = service_with_a_pod();
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    let mut older = api_server.objects[&(ResourceKind::Pod, pod.clone())].clone();
    set_version(&mut older, 99);
    change_unobserved(&mut api_server, &pod, |it| {
        set_version(it, 100);
        it["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    });
    let newer = api_server.objects[&(ResourceKind::Pod, pod.clone())].clone();
    observe(&mut api_server, &pod, newer);
    answer(&mut api_server, &read, PodReadResult::Found(Box::new(older)));
    let entry = api_server.table().pods[&uid].clone();
    assert!(entry.kubelet_ready && entry.container_restarts);
}

#[test]
fn a_watch_that_is_behind_the_answer_does_not_bring_a_deleted_pod_back() {
    let (mut api_server, pod, uid) = service_with_a_pod();
    let deleted_at = api_server.now.rfc3339();
    let mut older = api_server.objects[&(ResourceKind::Pod, pod.clone())].clone();
    set_version(&mut older, 99);
    change_unobserved(&mut api_server, &pod, |it| {
        set_version(it, 100);
        it["metadata"]["deletionTimestamp"] = json!(deleted_at);
    });
    report_stop(&mut api_server, &uid, true);
    let read = take_read(&mut api_server);
    answer_with_object(&mut api_server, &read);
    observe(&mut api_server, &pod, older);
    assert_eq!(statement(&api_server, &uid), Some((Draining, false)));
}
