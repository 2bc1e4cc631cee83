//! Pods that stand by on the local node: their number, their orders, and the ends of standby.

use std::time::Duration;

use common::wire::{
    PodEntry,
    RoutingPhase::{Draining, Ready, Starting},
    StandbyOrder, StandbyReport,
};

use super::*;

/// Returns the service with annotations of its template besides the initial scale of 0.
fn with_annotations(annotations: &str) -> String {
    HELLO.replace(r#""0"}"#, &format!(r#""0", {annotations}}}"#))
}

/// Returns a service with these annotations on a node whose agent reports.
fn service(annotations: &str) -> MachineSim {
    let mut sim = MachineSim::new();
    begin_stream(&mut sim, 1);
    sim.apply(&with_annotations(annotations));
    sim
}

fn own_agent() -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: "rouse".into(), node: "rouse".into() }
}

fn begin_stream(sim: &mut MachineSim, stream: u64) {
    sim.step(ControllerEvent::ReportStreamBegin { reporter: own_agent(), stream });
}

fn end_stream(sim: &mut MachineSim, stream: u64) {
    sim.step(ControllerEvent::ReportStreamEnd { reporter: own_agent(), stream });
}

fn report(sim: &mut MachineSim, uid: &str, in_flight: u64, standby: Option<StandbyReport>) {
    let observation = PodObservation { in_flight, standby, ..pod_seen(uid) };
    sim.step(ControllerEvent::PodReported { reporter: own_agent(), stream: 1, observation });
}

fn frozen() -> Option<StandbyReport> {
    Some(StandbyReport { is_frozen: true, memory_bytes: Some(1 << 20), failure: String::new() })
}

fn thawed() -> Option<StandbyReport> {
    Some(StandbyReport::default())
}

fn failed() -> Option<StandbyReport> {
    let failure = "the cgroup has no freezer".into();
    Some(StandbyReport { is_frozen: false, memory_bytes: None, failure })
}

/// Returns a sleeping service with these annotations whose pods are all frozen, and the UIDs of the pods.
fn frozen_service(annotations: &str) -> (MachineSim, Vec<String>) {
    let mut sim = service(annotations);
    let uids = sim.pod_uids();
    uids.iter().for_each(|uid| report(&mut sim, uid, 0, None));
    uids.iter().for_each(|uid| report(&mut sim, uid, 0, frozen()));
    (sim, uids)
}

/// Returns the phase of each pod, and true for one with an order, in the order of the UIDs.
fn standby_phases(sim: &MachineSim) -> Vec<(RoutingPhase, bool)> {
    sim.table().pods.values().map(|pod| (pod.phase, pod.standby.is_some())).collect()
}

fn entry(sim: &MachineSim, uid: &str) -> PodEntry {
    sim.table().pods[uid].clone()
}

fn path(sim: &MachineSim) -> ConnectionPath {
    sim.table().services[&hello()].connection_path
}

fn frozen_pods(sim: &MachineSim) -> u32 {
    sim.app().revisions[0].frozen_pods()
}

const ONE: &str = r#"rouse.dev/standby: "1""#;
const TWO: &str = r#"rouse.dev/standby: "2""#;

#[test]
fn a_revision_that_sleeps_keeps_pods_with_standby_orders() {
    let mut sim = service(ONE);
    assert_eq!(standby_phases(&sim), [(Starting, true)], "it starts without a request");
    let uid = sim.pod_uids().remove(0);
    report(&mut sim, &uid, 0, None);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
    report(&mut sim, &uid, 0, frozen());
    assert_eq!((sim.pods.len(), frozen_pods(&sim)), (1, 1));
    assert_eq!(sim.condition(ConditionType::RevisionStandby), "True");
    assert_eq!(
        sim.condition(ConditionType::RevisionActive),
        "False NoTraffic: The target is not receiving traffic."
    );
    // A request has thawed the pod, and the autoscaler has seen it.
    report(&mut sim, &uid, 1, thawed());
    sim.decide(1);
    assert_eq!((standby_phases(&sim), frozen_pods(&sim)), (vec![(Ready, false)], 0));
    assert_eq!(sim.condition(ConditionType::RevisionActive), "True");
    report(&mut sim, &uid, 0, None);
    sim.decide(0);
    assert_eq!((standby_phases(&sim), sim.pods.len()), (vec![(Ready, true)], 1));
    // The autoscaler withdraws its decision on a Revision that has fallen asleep.
    let revision = NamespacedName::new("default", "hello-00001");
    sim.step(ControllerEvent::DecisionWithdrawn(revision));
    assert_eq!((standby_phases(&sim), sim.pods.len()), (vec![(Ready, true)], 1));
}

#[test]
fn a_revision_without_the_annotation_keeps_no_pod() {
    let (sim, uids) = frozen_service(r#"rouse.dev/standby: "0""#);
    assert_eq!(uids, [""; 0]);
    assert_eq!(sim.condition(ConditionType::RevisionStandby), "Unknown");
}

#[test]
fn load_takes_pods_on_standby_first_and_adds_pods_beyond_them() {
    let (mut sim, uids) = frozen_service(TWO);
    assert_eq!(standby_phases(&sim), [(Ready, true), (Ready, true)]);
    sim.decide(1);
    let orders: usize = standby_phases(&sim).iter().filter(|(_, has_order)| *has_order).count();
    assert_eq!((sim.pods.len(), orders), (2, 1));
    sim.decide(3);
    uids.iter().for_each(|uid| report(&mut sim, uid, 0, None));
    assert_eq!(sim.pods.len(), 3);
    assert!(standby_phases(&sim).iter().all(|(_, has_order)| !has_order));
    sim.decide(0);
    let mut phases = standby_phases(&sim);
    phases.retain(|it| *it == (Ready, true));
    assert_eq!((sim.pods.len(), phases.len()), (2, 2), "the one that never was ready stops");
}

#[test]
fn the_pod_that_a_request_has_thawed_loses_its_order() {
    for thawed_index in [0, 1] {
        let (mut sim, uids) = frozen_service(TWO);
        report(&mut sim, &uids[thawed_index], 1, thawed());
        sim.decide(1);
        let orders = uids.iter().map(|uid| entry(&sim, uid).standby.is_some());
        let orders: Vec<bool> = orders.collect();
        assert_eq!(orders, [thawed_index != 0, thawed_index != 1]);
    }
}

#[test]
fn the_least_busy_pods_get_orders() {
    let mut sim = service(TWO);
    sim.decide(3);
    let uids = sim.pod_uids();
    for (uid, in_flight) in uids.iter().zip([5, 1, 3]) {
        report(&mut sim, uid, in_flight, None);
    }
    assert!(standby_phases(&sim).iter().all(|it| *it == (Ready, false)));
    sim.decide(1);
    let entries = uids.iter().map(|uid| entry(&sim, uid));
    let states: Vec<_> = entries.map(|it| (it.phase, it.standby.is_some())).collect();
    // Two of three stay, since two are to stand by: one serves, one has an order.
    assert_eq!(states, [(Ready, false), (Draining, false), (Ready, true)]);
}

#[test]
fn an_order_has_the_times_and_the_memory_setting_of_its_revision() {
    let annotations = concat!(
        r#"rouse.dev/standby: "1", rouse.dev/standby-memory: reclaim, "#,
        r#"autoscaling.knative.dev/window: 30s, "#,
        r#"autoscaling.knative.dev/scale-to-zero-pod-retention-period: 15s"#
    );
    let mut sim = MachineSim::new();
    begin_stream(&mut sim, 1);
    let probed =
        "image: dev.local/hello:v1, livenessProbe: {tcpSocket: {port: 8080}, timeoutSeconds: 7}";
    sim.apply(&with_annotations(annotations).replace("image: dev.local/hello:v1", probed));
    let uid = sim.pod_uids().remove(0);
    let order = StandbyOrder {
        quiet_time: Duration::from_secs(45),
        probe_time: Duration::from_secs(7),
        reclaims_memory: true,
        agent_timeout: StandbyOrder::DEFAULT_AGENT_TIMEOUT,
    };
    assert_eq!(entry(&sim, &uid).standby, Some(order));
}

/// The kubelet probes each pod every few seconds, and each change of the number would be a write.
#[test]
fn the_answer_to_a_probe_does_not_end_a_freeze_for_users() {
    let (mut sim, uids) = frozen_service(ONE);
    report(&mut sim, &uids[0], 0, thawed());
    assert_eq!(frozen_pods(&sim), 1);
    report(&mut sim, &uids[0], 1, thawed());
    assert_eq!(frozen_pods(&sim), 0, "that is a request");
    report(&mut sim, &uids[0], 0, thawed());
    assert_eq!(frozen_pods(&sim), 0, "it is not frozen yet");
    report(&mut sim, &uids[0], 0, frozen());
    assert_eq!(frozen_pods(&sim), 1);
}

#[test]
fn requests_go_directly_to_pods_that_stand_by() {
    let through_activators = |requested_scale: u32| {
        let decision = decision("hello-00001", requested_scale);
        let connection_path = ConnectionPath::Activator;
        ControllerEvent::DecisionReceived(ScaleDecision { connection_path, ..decision })
    };
    let burst = |capacity: &str| {
        format!(r#"{ONE}, autoscaling.knative.dev/target-burst-capacity: "{capacity}""#)
    };
    let (mut sim, _) = frozen_service(&burst("200"));
    assert_eq!(path(&sim), ConnectionPath::Direct, "without a decision");
    sim.step(through_activators(0));
    assert_eq!(path(&sim), ConnectionPath::Direct);
    sim.step(through_activators(1));
    assert_eq!(path(&sim), ConnectionPath::Activator, "its load decides now");
    let (mut sim, _) = frozen_service(&burst("-1"));
    sim.step(through_activators(0));
    assert_eq!(path(&sim), ConnectionPath::Activator, "the user wants activators in the path");
}

#[test]
fn a_request_waits_for_another_pod_once_the_agent_of_a_frozen_one_is_silent() {
    let (mut sim, uids) = frozen_service(ONE);
    end_stream(&mut sim, 1);
    sim.advance_time(249);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
    sim.advance_time(1);
    assert_eq!(standby_phases(&sim), [(Starting, true)], "no component would thaw it");
    assert_eq!(sim.pods.len(), 1, "without a request nothing starts");
    sim.decide(1);
    assert_eq!(sim.pods.len(), 2);
    assert!(entry(&sim, &uids[0]).standby.is_some(), "no agent would act on a change");
    let new = sim.pod_uids().into_iter().find(|uid| *uid != uids[0]).expect("a second pod");
    report(&mut sim, &new, 1, None);
    assert_eq!((entry(&sim, &new).phase, entry(&sim, &new).standby), (Ready, None));
    // The agent has thawed all pods at its start.
    begin_stream(&mut sim, 2);
    let old = entry(&sim, &uids[0]);
    assert_eq!((old.phase, old.standby), (Draining, None), "one pod carries the load");
}

fn activator() -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Activator, name: "a".into(), node: "rouse".into() }
}

/// An agent that hangs keeps its stream open, and thaws nothing.
#[test]
fn a_frozen_pod_that_an_activator_passes_over_is_not_ready_until_that_ends() {
    let (mut sim, uids) = frozen_service(ONE);
    let pass_over = || ControllerEvent::PodPassedOver {
        reporter: activator(),
        stream: 2,
        pod_uid: uids[0].clone(),
    };
    sim.step(ControllerEvent::ReportStreamBegin { reporter: activator(), stream: 2 });
    let ends = [
        ControllerEvent::PodUsedAgain {
            reporter: activator(),
            stream: 2,
            pod_uid: uids[0].clone(),
        },
        // Its next stream does not name the pod.
        ControllerEvent::ReportStreamBegin { reporter: activator(), stream: 3 },
    ];
    for end in ends {
        sim.step(pass_over());
        assert_eq!(standby_phases(&sim), [(Starting, true)]);
        assert_eq!(sim.pods.len(), 1, "without a request nothing starts");
        sim.step(end);
        sim.step(ControllerEvent::ReportStreamSynced { reporter: activator(), stream: 3 });
        assert_eq!(standby_phases(&sim), [(Ready, true)]);
    }
}

#[test]
fn a_request_waits_for_another_pod_while_an_activator_passes_over_the_frozen_one() {
    let (mut sim, uids) = frozen_service(ONE);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: activator(), stream: 2 });
    let pod_uid = uids[0].clone();
    sim.step(ControllerEvent::PodPassedOver { reporter: activator(), stream: 2, pod_uid });
    sim.decide(1);
    assert_eq!(sim.pods.len(), 2);
    let frozen = entry(&sim, &uids[0]);
    assert_eq!((frozen.phase, frozen.standby.is_some()), (Starting, true));
    // The activator is gone, and with it all that it has stated.
    sim.step(ControllerEvent::ReportStreamEnd { reporter: activator(), stream: 2 });
    assert_eq!(entry(&sim, &uids[0]).phase, Ready);
}

/// A running pod has no order, and a connection to it may be silent for any time.
#[test]
fn a_running_pod_is_ready_whatever_activators_state_of_it() {
    let mut sim = service(ONE);
    sim.decide(1);
    let uid = sim.pod_uids().remove(0);
    report(&mut sim, &uid, 1, None);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: activator(), stream: 2 });
    let pod_uid = uid.clone();
    sim.step(ControllerEvent::PodPassedOver { reporter: activator(), stream: 2, pod_uid });
    assert_eq!(standby_phases(&sim), [(Ready, false)]);
}

/// Each upgrade of the agents would otherwise show every service that sleeps as one that does not start.
#[test]
fn a_sleeping_service_stays_ready_while_the_agent_of_its_frozen_pod_is_silent() {
    let (mut sim, uids) = frozen_service(ONE);
    sim.report_pod_status(&uids[0], NodePhase::Running, ContainerRunState::Running, 0);
    sim.advance_time(60_000);
    assert_eq!(sim.condition(ConditionType::RevisionReady), "True");
    end_stream(&mut sim, 1);
    sim.advance_time(250);
    assert_eq!(standby_phases(&sim), [(Starting, true)]);
    assert_eq!(sim.condition(ConditionType::RevisionReady), "True");
}

#[test]
fn a_stream_that_is_opened_again_at_once_changes_nothing() {
    let (mut sim, _) = frozen_service(ONE);
    end_stream(&mut sim, 1);
    sim.advance_time(249);
    begin_stream(&mut sim, 2);
    sim.advance_time(60_000);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
}

/// The order is withdrawn, and the agent has not thawed the pod.
#[test]
fn a_pod_that_may_still_be_frozen_is_not_ready_without_its_agent() {
    let (mut sim, uids) = frozen_service(ONE);
    sim.decide(1);
    assert_eq!(standby_phases(&sim), [(Ready, false)]);
    end_stream(&mut sim, 1);
    sim.advance_time(250);
    assert_eq!(entry(&sim, &uids[0]).phase, Starting);
    assert_eq!(sim.pods.len(), 2, "the load needs a pod that answers");
}

#[test]
fn a_pod_gets_its_order_once_its_agent_reports() {
    let mut sim = MachineSim::new();
    sim.apply(&with_annotations(ONE));
    sim.decide(1);
    let uid = sim.pod_uids().remove(0);
    report(&mut sim, &uid, 0, None);
    sim.decide(0);
    assert_eq!(standby_phases(&sim), [(Ready, false)]);
    assert_eq!(
        sim.condition(ConditionType::RevisionStandby),
        "Unknown AgentMissing: The agent of node \"rouse\" does not report"
    );
    begin_stream(&mut sim, 1);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
    assert_eq!(sim.condition(ConditionType::RevisionStandby), "True");
}

#[test]
fn a_pod_that_cannot_be_frozen_ends_and_none_stands_by_until_the_next_wake() {
    let (mut sim, uids) = frozen_service(ONE);
    report(&mut sim, &uids[0], 0, failed());
    assert_eq!(entry(&sim, &uids[0]).phase, Draining);
    let condition = sim.condition(ConditionType::RevisionStandby);
    let name = &sim.app().revisions[0].pods[0].name;
    assert_eq!(
        condition,
        format!("False FreezeFailed: Pod {name} cannot be frozen: the cgroup has no freezer")
    );
    sim.decide(0);
    report(&mut sim, &uids[0], 0, None);
    assert_eq!(entry(&sim, &uids[0]).phase, Draining);
    sim.decide(1);
    assert_eq!(sim.condition(ConditionType::RevisionStandby), "True");
    assert_eq!(standby_phases(&sim), [(Ready, false)]);
    sim.decide(0);
    assert_eq!(standby_phases(&sim), [(Ready, true)], "it is tried again after a wake");
}

/// Otherwise a spare pod beside running ones would be started, fail and be ended without end.
#[test]
fn a_failure_under_load_ends_standby_until_the_revision_has_slept_and_woken() {
    let (mut sim, uids) = frozen_service(TWO);
    report(&mut sim, &uids[0], 1, thawed());
    sim.decide(1);
    assert!(entry(&sim, &uids[1]).standby.is_some());
    report(&mut sim, &uids[1], 0, failed());
    assert_eq!(entry(&sim, &uids[1]).phase, Draining);
    sim.decide(2);
    assert!(sim.condition(ConditionType::RevisionStandby).starts_with("False FreezeFailed"));
    report(&mut sim, &uids[0], 0, None);
    report(&mut sim, &uids[1], 0, None);
    sim.decide(0);
    assert!(standby_phases(&sim).iter().all(|it| *it == (Draining, false)));
    sim.decide(1);
    assert_eq!(sim.condition(ConditionType::RevisionStandby), "True");
}

#[test]
fn a_pod_whose_time_is_over_ends_until_the_next_wake() {
    let (mut sim, uids) = frozen_service(r#"rouse.dev/standby: "1", rouse.dev/standby-ttl: 1h"#);
    sim.advance_time(3_599_999);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
    sim.advance_time(1);
    assert_eq!(standby_phases(&sim), [(Draining, false)]);
    assert!(sim.condition(ConditionType::RevisionStandby).starts_with("False StandbyTimeOver"));
    report(&mut sim, &uids[0], 0, None);
    sim.decide(1);
    sim.decide(0);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
}

#[test]
fn a_spare_pod_whose_time_is_over_leaves_standby_to_the_pods_that_served() {
    let ttl = "rouse.dev/standby-ttl: 1h";
    let (mut sim, uids) = frozen_service(&format!("{TWO}, {ttl}"));
    report(&mut sim, &uids[0], 1, thawed());
    sim.decide(1);
    sim.advance_time(3_600_000);
    assert_eq!(entry(&sim, &uids[0]).standby, None);
    assert_eq!(entry(&sim, &uids[1]).phase, Draining);
    assert!(sim.condition(ConditionType::RevisionStandby).starts_with("False StandbyTimeOver"));
    report(&mut sim, &uids[0], 0, None);
    sim.decide(0);
    let served = entry(&sim, &uids[0]);
    assert_eq!((served.phase, served.standby.is_some()), (Ready, true));
    assert_eq!(sim.condition(ConditionType::RevisionStandby), "True");
}

#[test]
fn a_pod_that_is_in_use_has_no_end_of_its_time() {
    let (mut sim, uids) = frozen_service(r#"rouse.dev/standby: "1", rouse.dev/standby-ttl: 1h"#);
    // Without an autoscaler the order stays while requests come.
    report(&mut sim, &uids[0], 1, thawed());
    sim.advance_time(7_200_000);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
}

/// Without an autoscaler no wake gives the pod a new order, and none would start another pod.
#[test]
fn the_time_of_a_pod_begins_again_with_a_request() {
    let (mut sim, uids) = frozen_service(r#"rouse.dev/standby: "1", rouse.dev/standby-ttl: 1h"#);
    sim.advance_time(3_000_000);
    report(&mut sim, &uids[0], 1, thawed());
    report(&mut sim, &uids[0], 0, frozen());
    sim.advance_time(3_599_999);
    assert_eq!(standby_phases(&sim), [(Ready, true)]);
    sim.advance_time(1);
    assert_eq!(standby_phases(&sim), [(Draining, false)]);
}

#[test]
fn settings_that_exclude_standby_are_named_in_a_condition() {
    let condition = |text: &str| {
        let mut sim = MachineSim::new();
        begin_stream(&mut sim, 1);
        sim.apply(text);
        (sim.condition(ConditionType::RevisionStandby), sim.pods.len())
    };
    let probed = "image: dev.local/hello:v1, livenessProbe: {exec: {command: [a]}}";
    let text = with_annotations(ONE).replace("image: dev.local/hello:v1", probed);
    let message = "False WithoutEffect: Without effect: a probe runs a command, which the kubelet \
                   could not run in a frozen pod";
    assert_eq!(condition(&text), (message.to_owned(), 0));
    let min = format!(r#"{ONE}, autoscaling.knative.dev/min-scale: "1""#);
    let message =
        "False WithoutEffect: Without effect: min-scale keeps at least as many pods running";
    assert_eq!(condition(&with_annotations(&min)), (message.to_owned(), 1));
    let max = format!(r#"{TWO}, autoscaling.knative.dev/max-scale: "1""#);
    let message = "True MaxScale: max-scale bounds the number of pods to 1";
    assert_eq!(condition(&with_annotations(&max)), (message.to_owned(), 1));
}

#[test]
fn a_new_revision_does_not_use_the_pods_of_an_old_one() {
    let (mut sim, uids) = frozen_service(ONE);
    sim.apply(&with_annotations(ONE).replace(":v1", ":v2"));
    let old = entry(&sim, &uids[0]);
    assert_eq!((old.phase, old.standby), (Draining, None));
    let new = sim.pod_uids().into_iter().find(|uid| *uid != uids[0]).expect("one of its own");
    let new = entry(&sim, &new);
    assert_eq!((&*new.revision.name, new.standby.is_some()), ("hello-00002", true));
}

#[test]
fn a_deleted_service_keeps_no_pod() {
    let (mut sim, _) = frozen_service(ONE);
    sim.step(ControllerEvent::ManifestDeleted(hello()));
    assert_eq!(standby_phases(&sim), [(Draining, false)]);
}

/// Pods that crash would be started again and again without any request.
#[test]
fn pods_that_fail_are_not_kept_without_load() {
    let mut sim = service(ONE);
    let uid = sim.pod_uids().remove(0);
    let crashed = ContainerRunState::Waiting {
        reason: "CrashLoopBackOff".into(),
        message: "exit".into(),
        last_exit: Some(1),
    };
    sim.report_pod_status(&uid, NodePhase::Running, crashed, 1);
    assert_eq!(sim.pods.len(), 0);
    let message = "False PodsFail: No pod becomes ready, so none is kept without load.";
    assert_eq!(sim.condition(ConditionType::RevisionStandby), message);
    sim.advance_time(60_000);
    assert_eq!(sim.pods.len(), 0);
    sim.decide(1);
    let uid = sim.pod_uids().remove(0);
    report(&mut sim, &uid, 0, None);
    sim.decide(0);
    assert_eq!((sim.pods.len(), frozen_pods(&sim)), (1, 0));
    let own = entry(&sim, &uid);
    assert_eq!((own.phase, own.standby.is_some()), (Ready, true), "it works again");
}

/// The kubelet starts the container again. A pod that has never been ready, or ends again and again, is not kept.
#[test]
fn a_frozen_pod_whose_container_is_killed_is_kept() {
    let (mut sim, uids) = frozen_service(ONE);
    let killed = || ContainerRunState::Terminated {
        code: 137,
        reason: "OOMKilled".into(),
        message: String::new(),
    };
    for restarts in [0, 3] {
        sim.report_pod_status(&uids[0], NodePhase::Running, killed(), restarts);
        assert_eq!(standby_phases(&sim), [(Starting, true)], "{restarts}");
        sim.report_pod_status(
            &uids[0],
            NodePhase::Running,
            ContainerRunState::Running,
            restarts + 1,
        );
        assert_eq!(standby_phases(&sim), [(Ready, true)], "{restarts}");
    }
    sim.report_pod_status(&uids[0], NodePhase::Running, killed(), 4);
    assert_eq!(standby_phases(&sim), [(Draining, false)]);
}

#[test]
fn a_pod_that_ends_is_replaced_by_another_that_stands_by() {
    let (mut sim, uids) = frozen_service(ONE);
    sim.report_pod_status(&uids[0], NodePhase::Removed, ContainerRunState::Running, 0);
    let new = sim.pod_uids().into_iter().find(|uid| *uid != uids[0]).expect("another one");
    assert_eq!((entry(&sim, &new).phase, entry(&sim, &new).standby.is_some()), (Starting, true));
}
