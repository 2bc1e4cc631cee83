use std::net::IpAddr;

use common::{
    local_node::{ContainerRunState, LocalContainerStatus, LocalPodSpec, PodRunPhase as NodePhase},
    wire::{
        ClientComponent, ComponentReplica, ConnectionPath, PodObservation, RevisionActivity,
        RouteTable, RoutingPhase, ScaleDecision,
    },
};

use super::*;
use crate::{
    model::{
        cluster_state::{ConditionReason, ConditionStatus, ConditionType, RoutingState},
        object::ResourceKind,
        scale_policy::ScalePolicyConfig,
    },
    read::parse::{self, ManifestDocument},
};

mod local_pods;
mod standby;

pub(super) const HELLO: &str = r#"
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {name: hello}
spec:
  template:
    metadata:
      annotations: {autoscaling.knative.dev/initial-scale: "0"}
    spec:
      containers: [{image: dev.local/hello:v1}]
"#;

pub(super) struct MachineSim {
    pub(super) machine: ControllerStateMachine,
    pub(super) now: UnixMillis,
    pub(super) pods: BTreeMap<String, LocalPodSpec>,
    pub(super) dns_names: BTreeMap<NamespacedName, Vec<IpAddr>>,
    pub(super) objects: BTreeSet<LocalObjectKey>,
}

/// Returns the RouteTable that a new stream gets; `None` before the first batch.
pub(super) fn route_table(machine: &ControllerStateMachine) -> Option<RouteTable> {
    let mut table = RouteTable::default();
    let mut cursor = machine.routes.subscribe();
    let first = cursor.try_next()?;
    for (_, change) in machine.route_messages(first, &mut cursor).changes {
        table.apply_change(change.expect("a state"));
    }
    Some(table)
}

impl MachineSim {
    pub(super) fn new() -> Self {
        let cluster = ClusterState { uid_seed: 7, ..ClusterState::default() };
        Self {
            machine: ControllerStateMachine::new(cluster, Outbox::new()),
            now: UnixMillis(1_000_000),
            pods: BTreeMap::new(),
            dns_names: BTreeMap::new(),
            objects: BTreeSet::new(),
        }
    }

    pub(super) fn step(&mut self, event: ControllerEvent) {
        let effects = self.machine.step(self.now, event);
        for pod in effects.pods_to_start {
            assert!(self.pods.insert(pod.uid.clone(), pod).is_none(), "ordered once");
        }
        for uid in effects.pods_to_stop {
            assert!(self.pods.remove(&uid).is_some(), "only what was ordered is stopped");
        }
        for (name, addresses) in effects.dns_names {
            match addresses.is_empty() {
                true => drop(self.dns_names.remove(&name)),
                false => drop(self.dns_names.insert(name, addresses)),
            }
        }
        self.objects = effects.changed_objects.into_iter().collect();
    }

    pub(super) fn apply(&mut self, text: &str) {
        for document in parse::manifest_documents(text, &ScalePolicyConfig::default()) {
            match document {
                ManifestDocument::Service { name, manifest } => {
                    self.step(ControllerEvent::ManifestApplied { name, manifest })
                }
                ManifestDocument::Refused { name, reason } => {
                    self.step(ControllerEvent::ManifestRefused {
                        name: name.expect("a name"),
                        reason,
                    });
                }
            }
        }
    }

    pub(super) fn advance_time(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
        self.step(ControllerEvent::Tick);
    }

    pub(super) fn app(&self) -> &AppState {
        &self.machine.cluster.apps[&hello()]
    }

    /// Returns the generations of Service, Configuration and Route.
    pub(super) fn generations(&self) -> [Option<u32>; 3] {
        let app = self.app();
        [
            app.service.as_ref().map(|it| it.meta.generation),
            app.configuration.as_ref().map(|it| it.meta.generation),
            app.route.as_ref().map(|it| it.meta.generation),
        ]
    }

    pub(super) fn table(&self) -> RouteTable {
        route_table(&self.machine).expect("a first batch")
    }

    pub(super) fn decide(&mut self, requested_scale: u32) {
        self.step(ControllerEvent::DecisionReceived(decision("hello-00001", requested_scale)));
    }

    pub(super) fn pod_uids(&self) -> Vec<String> {
        self.pods.keys().cloned().collect()
    }

    pub(super) fn report_pod(&mut self, uid: &str, change: impl FnOnce(&mut PodObservation)) {
        let mut observation =
            self.machine.cluster.pods.reports.get(uid).cloned().unwrap_or_else(|| pod_seen(uid));
        change(&mut observation);
        self.step(ControllerEvent::PodReported { reporter: agent(), stream: 1, observation });
    }

    pub(super) fn report_all_ready(&mut self) {
        for uid in self.pod_uids() {
            self.report_pod(&uid, |_| ());
        }
    }

    pub(super) fn phases(&self) -> Vec<RoutingPhase> {
        self.table().pods.values().map(|pod| pod.phase).collect()
    }

    /// Returns a condition of the app, or of its newest Revision, as `status reason: message`.
    pub(super) fn condition(&self, kind: ConditionType) -> String {
        let all = &self.app().conditions;
        let status = match all.get(kind) {
            ConditionStatus::Unknown(None) => {
                let revision = self.app().revisions.last();
                revision.map_or(ConditionStatus::Unknown(None), |it| it.conditions.get(kind))
            }
            status => status,
        };
        let describe = |reason: ConditionReason| format!(" {}: {}", reason.reason, reason.message);
        match status {
            ConditionStatus::True(reason) => {
                format!("True{}", reason.map(describe).unwrap_or_default())
            }
            ConditionStatus::Unknown(reason) => {
                format!("Unknown{}", reason.map(describe).unwrap_or_default())
            }
            ConditionStatus::False(reason) => format!("False{}", describe(reason)),
        }
    }

    pub(super) fn report_pod_status(
        &mut self,
        uid: &str,
        phase: NodePhase,
        state: ContainerRunState,
        restarts: u32,
    ) {
        let name = "user-container".to_owned();
        let container = LocalContainerStatus { name, state, restarts, image_digest: None };
        let containers = vec![container];
        let addresses = vec![IpAddr::from([10, 244, 0, 9])];
        let uid = uid.to_owned();
        self.step(ControllerEvent::PodRunStatus(PodRunStatus {
            uid,
            phase,
            addresses,
            containers,
            ready: false,
        }));
    }
}

pub(super) fn hello() -> NamespacedName {
    NamespacedName::new("default", "hello")
}

pub(super) fn agent() -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Agent, name: "n1".into(), node: "n1".into() }
}

pub(super) fn activator() -> ComponentReplica {
    ComponentReplica { role: ClientComponent::Activator, name: "n1".into(), node: "n1".into() }
}

pub(crate) fn pod_seen(uid: &str) -> PodObservation {
    PodObservation {
        uid: uid.into(),
        address: Some(([10, 244, 0, 9], 8080).into()),
        other_family_address: None,
        listening: true,
        ready: true,
        drained: false,
        in_flight: 0,
        listening_since_ns: 1,
        not_ready_reason: String::new(),
        counts_all_ports: true,
        standby: None,
        awaits_stop: false,
    }
}

pub(super) fn decision(revision: &str, requested_scale: u32) -> ScaleDecision {
    ScaleDecision {
        revision: NamespacedName::new("default", revision),
        requested_scale: Some(requested_scale),
        connection_path: ConnectionPath::Direct,
        activator_count: 0,
        activity: if requested_scale > 0 {
            RevisionActivity::Active
        } else {
            RevisionActivity::Inactive
        },
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 70.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: "test".into(),
        inputs: None,
        wake_origin: None,
    }
}

#[test]
fn a_sleeping_service_is_ready_has_addresses_and_no_pod() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    assert_eq!(sim.pods.len(), 0);
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
    assert_eq!(
        sim.condition(ConditionType::RevisionActive),
        "False NoTraffic: The target is not receiving traffic."
    );
    let table = sim.table();
    let service = &table.services[&hello()];
    assert_eq!(service.targets[0].revision, NamespacedName::new("default", "hello-00001"));
    assert_eq!(service.hosts, ["hello.default.localhost"]);
    assert_eq!(service.addresses, sim.dns_names[&hello()]);
    assert!((20_000..=29_999).contains(&service.activator_port.get()));
}

#[test]
fn a_decision_starts_a_pod_and_a_listener_makes_it_ready_in_one_step_each() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    let (uid, pod_spec) =
        sim.pods.first_key_value().map(|(k, v)| (k.clone(), v.clone())).expect("one");
    assert!(pod_spec.name.starts_with("hello-00001-deployment-") && pod_spec.name.len() == 28);
    let env = pod_spec.spec.containers[0].env.clone().unwrap_or_default();
    let env: Vec<_> = env.iter().map(|it| (it.name.as_str(), it.value.as_deref())).collect();
    let expected = [
        ("PORT", Some("8080")),
        ("K_REVISION", Some("hello-00001")),
        ("K_CONFIGURATION", Some("hello")),
        ("K_SERVICE", Some("hello")),
    ];
    assert_eq!(env, expected);
    assert_eq!(sim.phases(), [RoutingPhase::Starting]);
    // The node has not reported any status yet.
    sim.report_pod(&uid, |_| ());
    assert_eq!(sim.phases(), [RoutingPhase::Ready]);
    assert_eq!(sim.table().services[&hello()].connection_path, ConnectionPath::Direct);
}

/// Knative admits such a template too: the initial scale is reached once, and then the maximum holds.
#[test]
fn an_initial_scale_above_the_maximum_becomes_ready() {
    let mut sim = MachineSim::new();
    let bounds = r#""3", autoscaling.knative.dev/max-scale: "1""#;
    sim.apply(&HELLO.replace(r#""0""#, bounds));
    assert_eq!(sim.pods.len(), 3);
    let uids: Vec<String> = sim.pods.keys().cloned().collect();
    uids.iter().for_each(|uid| sim.report_pod(uid, |_| ()));
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
    let serving = sim.phases().into_iter().filter(|it| *it == RoutingPhase::Ready).count();
    assert_eq!(serving, 1, "the maximum holds from then on");
}

/// Returns a ready pod, and an agent on stream 1 and an activator on stream 2 that may connect to it.
fn one_pod_with_two_reporters() -> (MachineSim, String) {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    sim.step(ControllerEvent::ReportStreamBegin { reporter: activator(), stream: 2 });
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids()[0].clone();
    (sim, uid)
}

#[test]
fn a_pod_stops_after_all_drain_acks_and_its_last_request() {
    let (mut sim, uid) = one_pod_with_two_reporters();
    sim.report_pod(&uid, |it| it.in_flight = 1);
    sim.decide(0);
    assert_eq!(sim.phases(), [RoutingPhase::Draining]);
    sim.step(ControllerEvent::DrainAcked { reporter: agent(), stream: 1, pod_uid: uid.clone() });
    sim.report_pod(&uid, |it| (it.in_flight, it.drained) = (0, true));
    assert_eq!(sim.pods.len(), 1, "the activator may still send");
    sim.step(ControllerEvent::DrainAcked {
        reporter: activator(),
        stream: 2,
        pod_uid: uid.clone(),
    });
    assert_eq!(sim.pods.len(), 0);
    assert_eq!(sim.phases(), []);
    sim.step(ControllerEvent::PodRunStatus(PodRunStatus {
        uid,
        phase: NodePhase::Removed,
        addresses: vec![],
        containers: vec![],
        ready: false,
    }));
    assert_eq!(sim.app().revisions[0].pods, []);
}

#[test]
fn a_draining_pod_serves_again_when_it_is_wanted_again() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    sim.decide(1);
    sim.report_all_ready();
    sim.decide(0);
    sim.decide(1);
    assert_eq!((sim.pods.len(), sim.phases()), (1, vec![RoutingPhase::Ready]));
    assert_eq!(sim.app().revisions[0].scaling.pods_created, 1);
}

#[test]
fn earlier_drain_acks_do_not_stop_a_pod_that_served_again() {
    let (mut sim, uid) = one_pod_with_two_reporters();
    sim.decide(0);
    for (reporter, stream) in [(agent(), 1), (activator(), 2)] {
        sim.step(ControllerEvent::DrainAcked { reporter, stream, pod_uid: uid.clone() });
    }
    sim.decide(1);
    sim.decide(0);
    sim.report_pod(&uid, |it| it.drained = true);
    assert_eq!(sim.pods.len(), 1, "reporters may have begun to connect again meanwhile");
    sim.step(ControllerEvent::DrainAcked { reporter: agent(), stream: 1, pod_uid: uid.clone() });
    sim.step(ControllerEvent::ReportStreamEnd { reporter: activator(), stream: 2 });
    assert_eq!(sim.pods.len(), 0, "one reporter is gone, the other has acknowledged");
}

#[test]
fn a_missing_drain_ack_is_waited_for_one_second() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids()[0].clone();
    sim.decide(0);
    sim.report_pod(&uid, |it| it.drained = true);
    sim.advance_time(999);
    assert_eq!(sim.pods.len(), 1);
    sim.advance_time(1);
    assert_eq!(sim.pods.len(), 0);
}

#[test]
fn the_grace_period_bounds_a_drain() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids()[0].clone();
    sim.report_pod(&uid, |it| it.in_flight = 1);
    sim.decide(0);
    sim.advance_time(299_999);
    assert_eq!(sim.pods.len(), 1);
    sim.advance_time(1);
    assert_eq!(sim.pods.len(), 0);
}

#[test]
fn the_least_busy_pods_go_first() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(3);
    sim.report_all_ready();
    let uids = sim.pod_uids();
    for (uid, in_flight) in uids.iter().zip([5, 1, 3]) {
        sim.report_pod(uid, |it| it.in_flight = in_flight);
    }
    sim.decide(1);
    let phases: Vec<_> = uids.iter().map(|uid| sim.table().pods[uid].phase).collect();
    assert_eq!(phases, [RoutingPhase::Ready, RoutingPhase::Draining, RoutingPhase::Draining]);
}

#[test]
fn only_a_changed_template_makes_a_revision() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.apply(&HELLO.replace("{name: hello}", "{name: hello, labels: {team: a}}"));
    assert_eq!((sim.generations(), sim.app().revisions.len()), ([Some(1); 3], 1));
    sim.apply(&HELLO.replace(":v1", ":v2"));
    assert_eq!(sim.generations(), [Some(2), Some(2), Some(1)]);
    let routing: Vec<_> =
        sim.app().revisions.iter().map(|it| (&*it.name, it.routing.state)).collect();
    assert_eq!(
        routing,
        [("hello-00001", RoutingState::Reserve), ("hello-00002", RoutingState::Active)]
    );
    assert!(!sim.table().revisions.contains_key(&NamespacedName::new("default", "hello-00001")));
}

/// The RouteTable has the Revision until then, because the autoscaler should start it.
#[test]
fn a_revision_that_never_started_leaves_the_route_table_when_it_is_garbage_collected() {
    let mut sim = MachineSim::new();
    let system_namespace = sim.machine.cluster.settings.system_namespace.clone();
    let config_gc = serde_json::json!({ "data": {
        "min-non-active-revisions": "0",
        "retain-since-create-time": "1h",
        "retain-since-last-active-time": "1h",
    } });
    sim.step(ControllerEvent::ObjectObserved {
        resource: ResourceKind::ConfigMap,
        name: NamespacedName::new(system_namespace, "config-gc"),
        object: Some(Box::new(config_gc)),
    });
    sim.apply(&HELLO.replace("\"0\"", "\"1\""));
    let uid = sim.pod_uids()[0].clone();
    sim.apply(&HELLO.replace(":v1", ":v2"));
    sim.decide(0);
    sim.report_pod_status(&uid, NodePhase::Removed, ContainerRunState::Running, 0);
    let revision_names = |sim: &MachineSim| -> Vec<String> {
        sim.table().revisions.keys().map(|it| it.name.to_string()).collect()
    };
    assert_eq!(revision_names(&sim), ["hello-00001", "hello-00002"]);
    sim.advance_time(3_600_000);
    assert_eq!(sim.app().revisions.len(), 1);
    assert_eq!(revision_names(&sim), ["hello-00002"]);
}

#[test]
fn traffic_stays_until_the_new_revision_is_ready() {
    let mut sim = MachineSim::new();
    let warm = HELLO.replace("\"0\"", "\"1\"");
    sim.apply(&warm);
    assert_eq!(sim.pods.len(), 1, "the initial scale needs no decision");
    assert_eq!(
        sim.condition(ConditionType::RouteTraffic),
        "Unknown RevisionMissing: Configuration \"hello\" is waiting for a Revision to become ready."
    );
    sim.report_all_ready();
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
    sim.apply(&warm.replace(":v1", ":v2"));
    let target = |sim: &MachineSim| sim.table().services[&hello()].targets[0].revision.name.clone();
    assert_eq!((target(&sim), sim.pods.len()), ("hello-00001".into(), 2));
    sim.report_all_ready();
    assert_eq!(target(&sim), "hello-00002");
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
    assert!(!sim.table().revisions[&NamespacedName::new("default", "hello-00001")].reachable);
}

#[test]
fn a_crash_is_reported_and_requests_then_fail_fast() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    let uid = sim.pod_uids()[0].clone();
    let crash = |message: &str| ContainerRunState::Waiting {
        reason: "CrashLoopBackOff".into(),
        message: message.into(),
        last_exit: Some(3),
    };
    sim.report_pod_status(&uid, NodePhase::Running, crash("no such file: app.py"), 1);
    assert_eq!(
        sim.condition(ConditionType::RevisionHealthy),
        "False ExitCode3: Container failed with: no such file: app.py"
    );
    assert_eq!(
        sim.condition(ConditionType::ServiceReady),
        "False RevisionFailed: Revision \"hello-00001\" failed with message: Container failed with: no such file: app.py."
    );
    assert_eq!(sim.table().services[&hello()].targets.len(), 1);
    sim.report_pod_status(&uid, NodePhase::Running, crash("no such file: app.py"), 3);
    assert_eq!(sim.table().services[&hello()].targets.len(), 0, "answered 503 at once");
    sim.decide(0);
    assert_eq!(sim.table().services[&hello()].targets.len(), 1, "the next request tries again");
    sim.decide(1);
    sim.report_all_ready();
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
}

#[test]
fn a_pod_whose_container_has_crashed_gets_no_requests_though_another_one_listens() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    let uid = sim.pod_uids()[0].clone();
    let starting = || ContainerRunState::Waiting {
        reason: "ContainerCreating".into(),
        message: String::new(),
        last_exit: None,
    };
    sim.report_pod_status(&uid, NodePhase::Pending, starting(), 0);
    sim.report_pod(&uid, |_| {});
    assert_eq!(
        sim.phases(),
        [RoutingPhase::Ready],
        "a listener may be known before the runtime reports the container"
    );
    let crashed = ContainerRunState::Waiting {
        reason: "CrashLoopBackOff".into(),
        message: "Address already in use".into(),
        last_exit: Some(1),
    };
    sim.report_pod_status(&uid, NodePhase::Running, crashed, 1);
    assert!(!sim.phases().contains(&RoutingPhase::Ready), "{:?}", sim.phases());
    assert_eq!(
        sim.condition(ConditionType::RevisionHealthy),
        "False ExitCode1: Container failed with: Address already in use"
    );
    sim.report_pod_status(&uid, NodePhase::Running, ContainerRunState::Running, 1);
    assert_eq!(sim.phases(), [RoutingPhase::Ready]);
    assert_eq!(sim.condition(ConditionType::RevisionHealthy), "True");
}

#[test]
fn a_process_that_never_listens_is_named() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    let uid = sim.pod_uids()[0].clone();
    sim.report_pod_status(&uid, NodePhase::Running, ContainerRunState::Running, 0);
    assert_eq!(sim.condition(ConditionType::RevisionHealthy), "True");
    sim.advance_time(5000);
    let message = sim.condition(ConditionType::RevisionHealthy);
    assert!(
        message.starts_with(
            "Unknown ContainerNotReady: The container runs but nothing listens on port 8080"
        ),
        "{message}"
    );
    sim.report_pod(&uid, |it| {
        (it.ready, it.listening) = (false, false);
        it.not_ready_reason = "nginx listens on 80, not on 8080".into();
    });
    assert_eq!(
        sim.condition(ConditionType::RevisionHealthy),
        "Unknown ContainerNotReady: nginx listens on 80, not on 8080"
    );
}

#[test]
fn a_service_reports_why_its_first_pod_is_not_ready_even_after_the_deadline() {
    let mut sim = MachineSim::new();
    sim.apply(&HELLO.replace("\"0\"", "\"1\""));
    let uid = sim.pod_uids()[0].clone();
    sim.report_pod_status(&uid, NodePhase::Running, ContainerRunState::Running, 0);
    sim.report_pod(&uid, |it| {
        (it.ready, it.listening) = (false, false);
        it.not_ready_reason = "port 8080 is open for IPv6 only".into();
    });
    sim.advance_time(5000);
    let all = [
        ConditionType::RevisionReady,
        ConditionType::ConfigurationReady,
        ConditionType::ServiceReady,
    ];
    for kind in all {
        let reason = "Unknown ContainerNotReady: port 8080 is open for IPv6 only";
        assert_eq!(sim.condition(kind), reason, "{kind:?}");
    }
    sim.advance_time(600_000);
    let deadline_reason = "False ProgressDeadlineExceeded: Initial scale was never achieved: port 8080 is open for IPv6 only";
    assert_eq!(sim.condition(ConditionType::RevisionReady), deadline_reason);
    let service = sim.condition(ConditionType::ServiceReady);
    assert!(service.contains("open for IPv6 only"), "{service}");
}

#[test]
fn a_start_that_takes_too_long_is_given_up() {
    let mut sim = MachineSim::new();
    sim.apply(&HELLO.replace("\"0\"", "\"1\""));
    sim.advance_time(600_000);
    assert_eq!(
        sim.condition(ConditionType::RevisionResources),
        "False ProgressDeadlineExceeded: Initial scale was never achieved"
    );
}

#[test]
fn an_image_that_is_missing_is_still_named_after_the_deadline() {
    let mut sim = MachineSim::new();
    sim.apply(&HELLO.replace("\"0\"", "\"1\""));
    let uid = sim.pod_uids()[0].clone();
    let (reason, message) = ("ErrImagePull".to_owned(), "dev.local/hello:v1: not found".to_owned());
    let waits = ContainerRunState::Waiting { reason, message, last_exit: None };
    sim.report_pod_status(&uid, NodePhase::Pending, waits, 0);
    let named = "False ErrImagePull: dev.local/hello:v1: not found";
    assert_eq!(sim.condition(ConditionType::RevisionReady), named);
    sim.advance_time(600_000);
    assert_eq!(sim.condition(ConditionType::RevisionReady), named);
    let status = sim.condition(ConditionType::RevisionResources);
    assert!(status.ends_with("never achieved: dev.local/hello:v1: not found"), "{status}");
}

#[test]
fn a_refused_manifest_leaves_the_old_one_in_force() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.apply(&HELLO.replace("{image: dev.local/hello:v1}", "{name: a}"));
    assert_eq!(
        sim.condition(ConditionType::ServiceReady),
        "False InvalidManifest: missing field(s): spec.template.spec.containers[0].image"
    );
    assert_eq!(sim.table().services[&hello()].targets.len(), 1);
    sim.apply(HELLO);
    assert_eq!(sim.condition(ConditionType::ServiceReady), "True");
}

#[test]
fn a_deleted_service_drains_and_then_is_gone() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids()[0].clone();
    sim.step(ControllerEvent::ManifestDeleted(hello()));
    assert_eq!((sim.table().services.len(), sim.dns_names.len()), (0, 0));
    assert_eq!(sim.phases(), [RoutingPhase::Draining]);
    sim.report_pod(&uid, |it| it.drained = true);
    assert_eq!(sim.pods.len(), 0);
    sim.report_pod_status(&uid, NodePhase::Removed, ContainerRunState::Running, 0);
    let cluster = &sim.machine.cluster;
    assert!(cluster.apps.is_empty() && cluster.allocated.cluster_ip_suffixes.is_empty());
    assert_eq!(sim.table(), RouteTable::default());
}

#[test]
fn a_service_applied_again_while_terminating_starts_again() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    let uid = |sim: &MachineSim| sim.app().service.as_ref().map(|it| it.meta.uid);
    let old_uid = uid(&sim);
    sim.decide(1);
    sim.report_all_ready();
    sim.step(ControllerEvent::ManifestDeleted(hello()));
    sim.now = sim.now.plus_ms(1);
    sim.apply(HELLO);
    assert_ne!(uid(&sim), old_uid);
    assert_eq!(sim.table().services.len(), 1);
    assert_eq!(sim.dns_names.len(), 1);
}

#[test]
fn tags_get_names_of_their_own_that_last() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    let traffic = "\n  traffic:\n  - {revisionName: hello-00001, percent: 90, tag: old}\n  - {latestRevision: true, percent: 10}\n";
    sim.apply(&format!("{}{traffic}", HELLO.trim_end().replace(":v1", ":v2")));
    let table = sim.table();
    let shares: Vec<_> = table.services[&hello()]
        .targets
        .iter()
        .map(|it| (it.revision.name.as_str(), it.percent))
        .collect();
    assert_eq!(shares, [("hello-00001", 90), ("hello-00002", 10)]);
    assert_eq!(
        table.services[&hello()].connection_path,
        ConnectionPath::Activator,
        "a split needs the activator"
    );
    let old = &table.services[&NamespacedName::new("default", "old-hello")];
    assert_eq!(old.hosts, ["old-hello.default.localhost"]);
    assert_eq!(old.targets[0].percent, 100);
    assert_ne!(old.activator_port, table.services[&hello()].activator_port);
    sim.apply(HELLO);
    assert_eq!(sim.table().services.len(), 1);
    assert_eq!(sim.dns_names.len(), 1);
}

/// The former owner drains for a while after its deletion, and the other one gets the name all the same.
#[test]
fn a_name_belongs_to_its_first_claimant_until_deletion() {
    let mut sim = MachineSim::new();
    let tagged = "\n  traffic:\n  - {latestRevision: true, percent: 100, tag: old}\n";
    sim.apply(&format!("{}{tagged}", HELLO.trim_end()));
    let first_name = NamespacedName::new("default", "old-hello");
    let previous = (sim.table().services[&first_name].clone(), sim.dns_names[&first_name].clone());
    sim.decide(1);
    sim.report_all_ready();
    sim.advance_time(1000);
    sim.apply(&HELLO.replace("{name: hello}", "{name: old-hello}"));
    let now = (sim.table().services[&first_name].clone(), sim.dns_names[&first_name].clone());
    assert_eq!((now.0.addresses, now.1), (previous.0.addresses.clone(), previous.1.clone()));
    assert_eq!(now.0.targets, previous.0.targets);
    let other = &sim.machine.cluster.apps[&first_name];
    assert!(
        matches!(other.conditions.get(ConditionType::RouteReady), ConditionStatus::False(reason) if reason.reason == "NotOwned")
    );
    sim.step(ControllerEvent::ManifestDeleted(hello()));
    sim.advance_time(600_000);
    let now = sim.table().services[&first_name].clone();
    assert_eq!(now.targets[0].revision.name, "old-hello-00001");
    assert_eq!(sim.dns_names[&first_name], now.addresses);
    assert!(sim.machine.cluster.apps[&first_name].conditions.is_true(ConditionType::RouteReady));
}

#[test]
fn what_an_agent_no_longer_sees_is_not_ready() {
    let mut sim = MachineSim::new();
    sim.apply(HELLO);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    sim.step(ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 1 });
    sim.decide(1);
    sim.report_all_ready();
    sim.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    assert_eq!(sim.phases(), [RoutingPhase::Ready], "a broken stream changes nothing");
    sim.step(ControllerEvent::ReportStreamSynced { reporter: agent(), stream: 1 });
    assert_eq!(sim.phases(), [RoutingPhase::Starting]);
}

/// As in Knative, only Routes keep an old Revision. Its pods still finish their requests.
#[test]
fn a_collected_revision_leaves_after_its_last_request() {
    let mut sim = MachineSim::new();
    let config_gc = [
        ("min-non-active-revisions", "0"),
        ("retain-since-create-time", "1h"),
        ("retain-since-last-active-time", "1h"),
    ];
    let config_gc = config_gc.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let settings = std::sync::Arc::make_mut(&mut sim.machine.cluster.settings);
    settings.config_maps.update("config-gc", Some(&BTreeMap::from(config_gc)));
    sim.apply(HELLO);
    sim.step(ControllerEvent::ReportStreamBegin { reporter: agent(), stream: 1 });
    sim.decide(1);
    sim.report_all_ready();
    let uid = sim.pod_uids()[0].clone();
    sim.report_pod(&uid, |it| it.in_flight = 1);
    sim.apply(&HELLO.replace(":v1", ":v2"));
    assert_eq!(sim.phases(), [RoutingPhase::Ready]);
    sim.advance_time(2 * 3_600_000);
    assert_eq!((sim.phases(), sim.pods.len()), (vec![RoutingPhase::Draining], 1));
    sim.step(ControllerEvent::DrainAcked { reporter: agent(), stream: 1, pod_uid: uid.clone() });
    sim.report_pod(&uid, |it| (it.in_flight, it.drained) = (0, true));
    assert_eq!(sim.pods.len(), 0);
    sim.report_pod_status(&uid, NodePhase::Removed, ContainerRunState::Running, 0);
    let names: Vec<&str> = sim.app().revisions.iter().map(|it| &*it.name).collect();
    assert_eq!(names, ["hello-00002"]);
}
