//! Pods of the local node that end late, that are frozen, or whose service is applied again while they drain.

use common::wire::StandbyReport;
use serde_json::Value;

use super::*;
use crate::{
    model::{knative::key::FROZEN_CONDITION, object::json::array_items},
    write::desired,
};

#[test]
fn a_pod_whose_node_never_reports_its_end_leaves_nothing_behind() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids().remove(0);
    sim.report_pod_status(&uid, NodePhase::Running, ContainerRunState::Running, 0);
    sim.decide(0);
    sim.report_pod(&uid, |it| it.drained = true);
    assert_eq!((sim.pods.len(), sim.machine.cluster.pods.statuses.len()), (0, 1));
    // The grace period of 300 s, and the time within which a node reports the end.
    sim.advance_time(329_999);
    assert_eq!(sim.app().revisions[0].pods.len(), 1);
    sim.advance_time(1);
    assert_eq!(sim.app().revisions[0].pods, []);
    sim.report_pod_status(&uid, NodePhase::Removed, ContainerRunState::Running, 0);
    let pods = &sim.machine.cluster.pods;
    assert_eq!((pods.statuses.len(), pods.reports.len()), (0, 0));
}

/// Only the controller's order ends a pod of the local node, so there is nothing to ask.
#[test]
fn a_pod_of_the_local_node_that_is_not_ordered_to_stop_restarts_a_container() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids().remove(0);
    let restarts = |sim: &MachineSim| sim.table().pods[&uid].container_restarts;
    sim.report_pod(&uid, |it| (it.ready, it.in_flight, it.awaits_stop) = (false, 1, true));
    assert!(restarts(&sim));
    sim.report_pod(&uid, |it| it.awaits_stop = false);
    assert!(!restarts(&sim));
    sim.report_pod(&uid, |it| it.awaits_stop = true);
    sim.decide(0);
    assert_eq!((sim.phases(), restarts(&sim)), (vec![RoutingPhase::Draining], false));
}

/// Returns a deleted service with one pod, in which a request is in flight.
fn deleted_with_a_request() -> (MachineSim, String) {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids().remove(0);
    sim.report_pod(&uid, |it| it.in_flight = 1);
    sim.step(ControllerEvent::ManifestDeleted(hello()));
    sim.now = sim.now.plus_ms(1);
    (sim, uid)
}

fn revision_names(sim: &MachineSim) -> Vec<&str> {
    sim.app().revisions.iter().map(|it| &*it.name).collect()
}

/// Checks that a pod drains, and lets it finish its last request and end.
fn finish_drain(sim: &mut MachineSim, uid: &str) {
    assert_eq!((sim.pod_uids(), sim.phases()), (vec![uid.into()], vec![RoutingPhase::Draining]));
    let pod_uid = uid.to_owned();
    sim.step(ControllerEvent::DrainAcked { reporter: agent(), stream: 1, pod_uid });
    sim.report_pod(uid, |it| (it.in_flight, it.drained) = (0, true));
    assert_eq!(sim.pods.len(), 0);
    sim.report_pod_status(uid, NodePhase::Removed, ContainerRunState::Running, 0);
}

#[test]
fn pods_of_a_deleted_service_finish_their_requests_beside_a_new_template() {
    let (mut sim, uid) = deleted_with_a_request();
    sim.apply(&HELLO.replace(":v1", ":v2"));
    assert_eq!(revision_names(&sim), ["hello-00001", "hello-00002"]);
    assert_eq!(sim.table().services[&hello()].targets[0].revision.name, "hello-00002");
    finish_drain(&mut sim, &uid);
    assert_eq!(revision_names(&sim), ["hello-00002"]);
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
}

#[test]
fn pods_of_a_deleted_service_serve_again_with_an_equal_template() {
    let (mut sim, uid) = deleted_with_a_request();
    sim.apply(HELLO);
    assert_eq!((sim.pod_uids(), sim.phases()), (vec![uid], vec![RoutingPhase::Ready]));
    assert_eq!(revision_names(&sim), ["hello-00001"]);
}

#[test]
fn pods_of_a_deleted_service_finish_their_requests_although_a_manifest_is_refused() {
    let (mut sim, uid) = deleted_with_a_request();
    sim.apply(&HELLO.replace("{image: dev.local/hello:v1}", "{name: a}"));
    assert!(sim.condition(ConditionType::ServiceReady).starts_with("False InvalidManifest"));
    assert_eq!((sim.pods.len(), revision_names(&sim)), (1, vec!["hello-00001"]));
    sim.apply(&HELLO.replace(":v1", ":v2"));
    assert_eq!(revision_names(&sim), ["hello-00001", "hello-00002"]);
    finish_drain(&mut sim, &uid);
    assert_eq!(revision_names(&sim), ["hello-00002"]);
}

/// Pods of two templates under one name could not be told apart.
#[test]
fn a_chosen_revision_name_is_free_once_the_pods_of_the_deleted_service_have_ended() {
    let named = HELLO.replace("      annotations:", "      name: hello-v1\n      annotations:");
    let changed = named.replace("hello:v1", "hello:v2");
    let mut sim = MachineSim::new();
    sim.apply(&named);
    sim.step(ControllerEvent::DecisionReceived(decision("hello-v1", 1)));
    sim.report_all_ready();
    let uid = sim.pod_uids().remove(0);
    sim.step(ControllerEvent::ManifestDeleted(hello()));
    sim.apply(&changed);
    let ready = sim.condition(ConditionType::ServiceReady);
    assert!(ready.contains("give another name"), "{ready}");
    assert_eq!((sim.pod_uids(), sim.phases()), (vec![uid.clone()], vec![RoutingPhase::Draining]));
    sim.report_pod(&uid, |it| it.drained = true);
    sim.report_pod_status(&uid, NodePhase::Removed, ContainerRunState::Running, 0);
    sim.apply(&changed);
    assert_eq!(revision_names(&sim), ["hello-v1"]);
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
}

/// Names that were cut show no app, so an index has them.
#[test]
fn a_refused_manifest_leaves_no_name_of_the_deleted_service_behind() {
    let mut sim = MachineSim::new();
    // The longest name of a local service: names of its Revision's children are cut.
    let long_name = "a".repeat(57);
    let manifest = HELLO.replace("{name: hello}", &format!("{{name: {long_name}}}"));
    sim.apply(&manifest);
    sim.step(ControllerEvent::DecisionReceived(decision(&format!("{long_name}-00001"), 1)));
    sim.report_all_ready();
    let uid = sim.pod_uids().remove(0);
    let full_name = NamespacedName::new("default", long_name);
    sim.step(ControllerEvent::ManifestDeleted(full_name.clone()));
    assert_ne!(sim.machine.cluster.names.owner_exceptions, BTreeSet::new());
    sim.apply(&manifest.replace("{image: dev.local/hello:v1}", "{name: a}"));
    sim.report_pod(&uid, |it| it.drained = true);
    sim.report_pod_status(&uid, NodePhase::Removed, ContainerRunState::Running, 0);
    sim.step(ControllerEvent::ManifestDeleted(full_name));
    assert_eq!(sim.machine.cluster.names.owner_exceptions, BTreeSet::new());
}

/// Returns the status of the condition that tells in a pod's object if the pod is frozen; null if it has none.
fn frozen_condition(sim: &MachineSim, uid: &str) -> Value {
    let key = LocalObjectKey::pod("default", &sim.pods[uid].name);
    let object = desired::local_object(&sim.machine.cluster, &key).expect("a pod");
    let mut conditions = array_items(&object["status"]["conditions"]);
    let frozen = conditions.find(|it| it["type"] == FROZEN_CONDITION);
    frozen.map(|it| it["status"].clone()).unwrap_or_default()
}

#[test]
fn the_object_of_a_pod_tells_if_it_is_frozen_while_it_has_a_standby_order() {
    let mut sim = MachineSim::new();
    let reporter = ComponentReplica {
        role: ClientComponent::Agent,
        name: "rouse".into(),
        node: "rouse".into(),
    };
    sim.step(ControllerEvent::ReportStreamBegin { reporter, stream: 1 });
    sim.apply(&HELLO.replace(r#""0"}"#, r#""0", rouse.dev/standby: "1"}"#));
    sim.report_all_ready();
    let uid = sim.pod_uids().remove(0);
    let mut report = |in_flight: u64, is_frozen: bool| {
        let standby = StandbyReport { is_frozen, ..StandbyReport::default() };
        sim.report_pod(&uid, |it| (it.in_flight, it.standby) = (in_flight, Some(standby)));
        frozen_condition(&sim, &uid)
    };
    assert_eq!(report(0, false), "False", "not yet");
    assert_eq!(report(0, true), "True");
    assert_eq!(report(0, false), "True", "a probe thaws it for a moment only");
    assert_eq!(report(1, false), "False", "a request has thawed it");
    sim.decide(1);
    assert_eq!(frozen_condition(&sim, &uid), Value::Null, "its order is withdrawn");
}
