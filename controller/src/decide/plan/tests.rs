//! Incremental planning, app by app, must equal planning everything at once after any history of events.

use std::collections::{BTreeMap, BTreeSet};

use common::{
    local_node::{ContainerRunState, LocalContainerStatus, PodRunPhase, PodRunStatus},
    outbox::{Outbox, OutboxBatch},
    wire::{
        ClientComponent, ComponentReplica, ConnectionPath, PodObservation, RevisionActivity,
        RouteKey, ScaleDecision, StandbyReport,
    },
};
use proptest::prelude::*;

use super::*;
use crate::{
    decide::machine::{ControllerEvent, ControllerStateMachine, RouteFingerprint},
    model::{cluster_state::ControllerSettings, scale_policy::ScalePolicyConfig},
    read::parse::{self, ManifestDocument},
};

#[derive(Clone, Debug)]
enum PlanCaseAction {
    Apply { app: u8, version: u8, split: u8, initial: u8, standby: u8 },
    RefuseManifest { app: u8 },
    Delete { app: u8 },
    Decide { app: u8, revision: u8, requested_scale: u8 },
    ReportPod { pod: u8, ready: bool, drained: bool, load: u8, standby: u8 },
    WithdrawReport { pod: u8 },
    SetRunStatus { pod: u8, state: u8 },
    BeginStream { reporter: u8 },
    EndStream { reporter: u8 },
    AckDrain { reporter: u8, pod: u8, withdrawn: bool },
    AdvanceTime { seconds: u16 },
}

fn action() -> impl Strategy<Value = PlanCaseAction> {
    prop_oneof![
        (0..4u8, 0..3u8, 0..5u8, 0..3u8, 0..3u8).prop_map(
            |(app, version, split, initial, standby)| {
                PlanCaseAction::Apply { app, version, split, initial, standby }
            },
        ),
        (0..4u8).prop_map(|app| PlanCaseAction::RefuseManifest { app }),
        (0..4u8).prop_map(|app| PlanCaseAction::Delete { app }),
        (0..4u8, 1..4u8, 0..4u8).prop_map(|(app, revision, requested_scale)| {
            PlanCaseAction::Decide { app, revision, requested_scale }
        }),
        (0..8u8, any::<bool>(), any::<bool>(), 0..3u8, 0..5u8).prop_map(
            |(pod, ready, drained, load, standby)| {
                PlanCaseAction::ReportPod { pod, ready, drained, load, standby }
            },
        ),
        (0..8u8).prop_map(|pod| PlanCaseAction::WithdrawReport { pod }),
        (0..8u8, 0..5u8).prop_map(|(pod, state)| PlanCaseAction::SetRunStatus { pod, state }),
        (0..2u8).prop_map(|reporter| PlanCaseAction::BeginStream { reporter }),
        (0..2u8).prop_map(|reporter| PlanCaseAction::EndStream { reporter }),
        (0..2u8, 0..8u8, any::<bool>()).prop_map(|(reporter, pod, withdrawn)| {
            PlanCaseAction::AckDrain { reporter, pod, withdrawn }
        }),
        prop_oneof![Just(0u16), Just(1), Just(5), Just(300), Just(700)]
            .prop_map(|seconds| PlanCaseAction::AdvanceTime { seconds }),
    ]
}

/// Returns the name of an app; the last one equals the name of the first one's tag `x`.
fn name(app: u8) -> NamespacedName {
    NamespacedName::new("default", ["a", "a-b", "c", "x-a"][usize::from(app)])
}

fn reporter(index: u8) -> ComponentReplica {
    let role = if index == 0 { ClientComponent::Agent } else { ClientComponent::Activator };
    ComponentReplica { role, name: "n".into(), node: "n".into() }
}

fn manifest(app: u8, version: u8, split: u8, initial: u8, standby: u8) -> ControllerEvent {
    let app_name = name(app).name;
    let traffic = match split {
        0 => "[]".into(),
        1 => "[{percent: 100, tag: now}]".into(),
        2 => {
            format!("[{{percent: 40}}, {{percent: 60, revisionName: {app_name}-00001, tag: old}}]")
        }
        3 => format!("[{{percent: 100, revisionName: {app_name}-00002}}]"),
        _ => format!(
            "[{{percent: 30}}, {{percent: 70}}, {{revisionName: {app_name}-00001, tag: x}}]"
        ),
    };
    let text = format!(
        r#"{{apiVersion: serving.knative.dev/v1, kind: Service, metadata: {{name: {app_name}}},
        spec: {{traffic: {traffic}, template: {{
          metadata: {{annotations: {{
            autoscaling.knative.dev/initial-scale: "{initial}", rouse.dev/standby: "{standby}",
            rouse.dev/standby-ttl: 10m}}}},
          spec: {{containers: [{{image: "hello:v{version}"}}]}}}}}}}}"#
    );
    match parse::manifest_documents(&text, &ScalePolicyConfig::default()).remove(0) {
        ManifestDocument::Service { name, manifest } => {
            ControllerEvent::ManifestApplied { name, manifest }
        }
        ManifestDocument::Refused { reason, .. } => panic!("{reason}"),
    }
}

fn decide(app: u8, revision: u8, requested_scale: u8) -> ControllerEvent {
    let app_name = name(app);
    ControllerEvent::DecisionReceived(ScaleDecision {
        revision: NamespacedName::new(
            app_name.namespace,
            format!("{}-0000{revision}", app_name.name),
        ),
        requested_scale: (requested_scale < 3).then_some(requested_scale.into()),
        connection_path: ConnectionPath::Direct,
        activator_count: 0,
        activity: [
            RevisionActivity::Inactive,
            RevisionActivity::Activating,
            RevisionActivity::Active,
        ][usize::from(requested_scale % 3)],
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 1.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: String::new(),
        inputs: None,
        wake_origin: None,
    })
}

/// Returns the event of an action, if there is a pod for it.
fn event(action: &PlanCaseAction, machine: &ControllerStateMachine) -> Option<ControllerEvent> {
    let pods = machine.cluster().apps.values().flat_map(|app| app.pods());
    let pods: Vec<String> = pods.map(|(_, pod)| pod.uid.to_string()).collect();
    let pick = |pod: u8| pods.get(usize::from(pod)).cloned();
    Some(match *action {
        PlanCaseAction::Apply { app, version, split, initial, standby } => {
            manifest(app, version, split, initial, standby)
        }
        PlanCaseAction::RefuseManifest { app } => {
            ControllerEvent::ManifestRefused { name: name(app), reason: "broken".into() }
        }
        PlanCaseAction::Delete { app } => ControllerEvent::ManifestDeleted(name(app)),
        PlanCaseAction::Decide { app, revision, requested_scale } => {
            decide(app, revision, requested_scale)
        }
        PlanCaseAction::ReportPod { pod, ready, drained, load, standby } => {
            let facts = ReportedFacts { ready, drained, load, standby };
            let observation = pod_observation(pick(pod)?, facts);
            ControllerEvent::PodReported { reporter: reporter(0), stream: 1, observation }
        }
        PlanCaseAction::WithdrawReport { pod } => ControllerEvent::PodReportWithdrawn {
            reporter: reporter(0),
            stream: 1,
            pod_uid: pick(pod)?,
        },
        PlanCaseAction::SetRunStatus { pod, state } => {
            ControllerEvent::PodRunStatus(status(pick(pod)?, state))
        }
        PlanCaseAction::BeginStream { reporter: index } => {
            ControllerEvent::ReportStreamBegin { reporter: reporter(index), stream: index.into() }
        }
        PlanCaseAction::EndStream { reporter: index } => {
            ControllerEvent::ReportStreamEnd { reporter: reporter(index), stream: index.into() }
        }
        PlanCaseAction::AckDrain { reporter: index, pod, withdrawn: false } => {
            ControllerEvent::DrainAcked {
                reporter: reporter(index),
                stream: index.into(),
                pod_uid: pick(pod)?,
            }
        }
        PlanCaseAction::AckDrain { reporter: index, pod, withdrawn: true } => {
            ControllerEvent::DrainAckWithdrawn {
                reporter: reporter(index),
                stream: index.into(),
                pod_uid: pick(pod)?,
            }
        }
        PlanCaseAction::AdvanceTime { .. } => ControllerEvent::Tick,
    })
}

/// Facts of a pod that an action reports.
struct ReportedFacts {
    ready: bool,
    drained: bool,
    load: u8,
    standby: u8,
}

fn pod_observation(uid: String, facts: ReportedFacts) -> PodObservation {
    let ReportedFacts { ready, drained, load, standby } = facts;
    PodObservation {
        uid,
        address: Some(([10, 0, 0, 1], 8080).into()),
        other_family_address: None,
        listening: ready || drained,
        ready,
        drained,
        in_flight: load.into(),
        listening_since_ns: 0,
        not_ready_reason: String::new(),
        counts_all_ports: true,
        standby: standby_report(standby),
        awaits_stop: false,
    }
}

/// Returns no report of standby, or one of a pod that runs, is frozen, or cannot be frozen.
fn standby_report(state: u8) -> Option<StandbyReport> {
    let failure = if state == 3 { "no freezer".into() } else { String::new() };
    let report = StandbyReport { is_frozen: state == 2, memory_bytes: None, failure };
    (1..4).contains(&state).then_some(report)
}

fn status(uid: String, state: u8) -> PodRunStatus {
    let waiting = |reason: &str, last_exit| ContainerRunState::Waiting {
        reason: reason.into(),
        message: "m".into(),
        last_exit,
    };
    let ready = state == 1;
    let (phase, state, restarts) = match state {
        0 => (PodRunPhase::Removed, ContainerRunState::Running, 0),
        1 => (PodRunPhase::Running, ContainerRunState::Running, 0),
        2 => (PodRunPhase::Running, waiting("CrashLoopBackOff", Some(1)), 4),
        3 => (PodRunPhase::Pending, waiting("ImagePullBackOff", None), 0),
        _ => (PodRunPhase::Pending, waiting("ContainerCreating", None), 0),
    };
    let name = "user-container".into();
    let container = LocalContainerStatus { name, state, restarts, image_digest: None };
    PodRunStatus { uid, phase, addresses: vec![], containers: vec![container], ready }
}

/// Compares the RouteTable's outbox with a plan of everything.
fn compare(machine: &ControllerStateMachine, now: UnixMillis) -> Result<(), TestCaseError> {
    let (mut routes, cluster) = (BTreeMap::<RouteKey, RouteChange>::new(), machine.cluster());
    for (name, app) in &cluster.apps {
        let plan = plan_app(cluster, name, now);
        prop_assert_eq!(plan.app.as_ref(), Some(&**app), "planning again changes nothing");
        routes.extend(plan.routes.into_iter().filter_map(|it| it.key().map(|key| (key, it))));
    }
    let mut cursor = machine.routes().subscribe();
    let first = cursor.try_next().unwrap_or(OutboxBatch { version: 0, changes: Vec::new() });
    let hashes: BTreeMap<_, _> =
        first.changes.iter().filter_map(|(key, it)| it.map(|it| (key.clone(), it))).collect();
    let planned =
        routes.iter().map(|(key, it)| (key.clone(), RouteFingerprint::of_change(it))).collect();
    prop_assert_eq!(hashes, planned, "the outbox has what is planned");
    let messages = machine.route_messages(first, &mut cursor).changes;
    let messages: BTreeMap<_, _> =
        messages.into_iter().filter_map(|(key, it)| it.map(|it| (key, it))).collect();
    prop_assert_eq!(&messages, &routes);
    for change in messages.values() {
        if let RouteChange::Service(service) = change {
            let sum: u32 = service.targets.iter().map(|it| u32::from(it.percent)).sum();
            prop_assert!(service.targets.is_empty() || sum == 100, "{} percent", sum);
            for target in &service.targets {
                let key = RouteKey::Revision(target.revision.clone());
                prop_assert!(
                    messages.contains_key(&key),
                    "{} is a target but not in the table",
                    key_text(&key)
                );
            }
        }
    }
    Ok(())
}

fn key_text(key: &RouteKey) -> String {
    format!("{key:?}")
}

proptest! {
    #[test]
    fn incremental_planning_equals_full_planning(actions in proptest::collection::vec(action(), 1..60)) {
        // The node of the agent, so that its pods may stand by.
        let settings = ControllerSettings { node_name: "n".into(), ..ControllerSettings::default() };
        let cluster = ClusterState { uid_seed: 1, settings: Arc::new(settings), ..ClusterState::default() };
        let mut machine = ControllerStateMachine::new(cluster, Outbox::new());
        let mut now = UnixMillis(1_000_000);
        let mut ordered = BTreeSet::new();
        for action in actions {
            if let PlanCaseAction::AdvanceTime { seconds } = action {
                now = now.plus_ms(u64::from(seconds) * 1000);
            }
            // The machine's timer must bring the passing of time to the plan.
            let due = machine.next_timer().is_some_and(|at| at <= now);
            for event in due.then_some(ControllerEvent::Tick).into_iter().chain(event(&action, &machine)) {
                let effects = machine.step(now, event);
                for pod in effects.pods_to_start {
                    prop_assert!(ordered.insert(pod.uid), "ordered once");
                }
                for uid in effects.pods_to_stop {
                    prop_assert!(ordered.remove(&uid), "only what was ordered is stopped");
                }
            }
            compare(&machine, now)?;
        }
    }
}
