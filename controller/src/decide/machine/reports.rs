//! Pure: reports of agents and activators: states of pods, drain acknowledgements, services that activators route, and
//! frozen pods that they pass over.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use common::wire::{ClientComponent, ComponentReplica, NamespacedName, PodObservation};
use tracing::warn;

use super::{ControllerStateMachine, pods};
use crate::{
    decide::plan,
    model::{
        cluster_state::{
            AppState, ClusterState, ConditionType, ObservedPods, PlatformKind, PodStage,
            RevisionPod, UnixMillis,
        },
        reporters::{self, ReporterStates},
    },
};

/// Maximum number of unknown pods that are kept per reporter; a node has a few hundred pods.
const MAX_UNPLACED_REPORTS: usize = 1000;

/// Record of one reporter: its newest stream, and the pods that it has named.
#[derive(Debug, Default)]
pub(super) struct ReporterPods {
    /// Name of the node on which the reporter runs.
    node: String,
    /// Number of its newest stream. Late messages of an older one have no effect: the newest states everything again.
    stream: u64,
    pods: BTreeSet<String>,
    /// Pods of earlier streams that the newest one has not named yet; `None` once it has named everything.
    unconfirmed_pods: Option<BTreeSet<String>>,
    /// Reports of pods whose node the API server has not stated yet.
    unplaced_reports: BTreeMap<String, PodObservation>,
}

/// Node of a pod, as seen from a reporter.
enum ReporterPlacement {
    /// The pod is on the reporter's node, so the reporter's state of it is used.
    ReporterNode,
    /// The pod is on this other node, whose agent alone may report it.
    OtherNode(String),
    /// The pod's node is not known yet.
    Unknown,
}

impl ReporterPods {
    fn forget_pod(&mut self, uid: &str) {
        self.pods.remove(uid);
        self.unplaced_reports.remove(uid);
        if let Some(unconfirmed_pods) = &mut self.unconfirmed_pods {
            unconfirmed_pods.remove(uid);
        }
    }

    fn retain_pods(&mut self, is_kept: impl Fn(&str) -> bool) {
        self.pods.retain(|uid| is_kept(uid));
        self.unplaced_reports.retain(|uid, _| is_kept(uid));
        if let Some(unconfirmed_pods) = &mut self.unconfirmed_pods {
            unconfirmed_pods.retain(|uid| is_kept(uid));
        }
    }

    /// Returns true if no pod of any stream is recorded.
    fn is_empty(&self) -> bool {
        self.pods.is_empty()
            && self.unplaced_reports.is_empty()
            && self.unconfirmed_pods.as_ref().is_none_or(BTreeSet::is_empty)
    }
}

/// Returns the record of a reporter; `None`: the stream is not its newest one, so this message is late.
///
/// An open stream has a record, and streams of all reporters are numbered in one sequence. So without a record, a
/// number up to `newest_forgotten_stream` shows that the stream, or a newer one of the reporter, has ended.
fn record_of_stream<'a>(
    pods_by_reporter: &'a mut BTreeMap<String, ReporterPods>,
    newest_forgotten_stream: u64,
    reporter: &ComponentReplica,
    stream: u64,
) -> Option<&'a mut ReporterPods> {
    let record = match pods_by_reporter.entry(reporter_id(reporter)) {
        Entry::Occupied(record) => record.into_mut(),
        Entry::Vacant(_) if stream <= newest_forgotten_stream => return None,
        Entry::Vacant(vacant) => vacant.insert(ReporterPods::default()),
    };
    (record.stream <= stream).then_some(record)
}

impl ControllerStateMachine {
    pub(super) fn handle_report_stream_begin(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        now: UnixMillis,
    ) {
        let was_lost = self.cluster.is_node_lost(&reporter.node);
        if !self.cluster.pods.reporters.begin_stream(&reporter_id(reporter), stream) {
            return;
        }
        self.handle_node_change(&reporter.node, was_lost, now);
        self.handle_agent_stream(reporter, now);
        let record = self.pods_by_reporter.entry(reporter_id(reporter)).or_default();
        record.node.clone_from(&reporter.node);
        record.stream = stream;
        // Pods that earlier streams named stay unconfirmed until the new one names them or ends its list.
        let named = std::mem::take(&mut record.pods);
        record.unconfirmed_pods.get_or_insert_default().extend(named);
    }

    /// Handles the end of a reporter's snapshot. Pods that it does not name are no longer reported.
    pub(super) fn handle_report_stream_synced(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        now: UnixMillis,
    ) {
        self.update_reporters(now, |all| all.handle_synced(&reporter_id(reporter), stream));
        let forgotten = self.newest_forgotten_stream;
        let record = record_of_stream(&mut self.pods_by_reporter, forgotten, reporter, stream);
        let Some(record) = record else { return };
        let Some(mut unconfirmed_pods) = record.unconfirmed_pods.take() else { return };
        unconfirmed_pods.iter().for_each(|uid| drop(record.unplaced_reports.remove(uid)));
        // Only the local node restores pods from disk. On Kubernetes, a hundred agents would each scan all pods.
        if reporter.role == ClientComponent::Agent
            && self.cluster.settings.platform == PlatformKind::Local
        {
            let restored = self.cluster.apps.values().flat_map(|app| app.pods());
            let restored = restored.filter(|(_, pod)| pod.restored_address.is_some());
            let silent = restored.filter(|(_, pod)| !record.pods.contains(&*pod.uid));
            unconfirmed_pods.extend(silent.map(|(_, pod)| pod.uid.to_string()));
        }
        for uid in unconfirmed_pods {
            self.remove_pod_report(&uid, now);
        }
    }

    pub(super) fn handle_report_stream_end(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        now: UnixMillis,
    ) {
        let was_lost = self.cluster.is_node_lost(&reporter.node);
        self.update_reporters(now, |all| all.end_stream(&reporter_id(reporter), stream));
        self.forget_lost_record(&reporter_id(reporter));
        self.handle_node_change(&reporter.node, was_lost, now);
        self.handle_agent_stream(reporter, now);
        self.reconcile_draining_apps(now);
    }

    /// Plans the apps with pods on standby on the node of an agent whose stream has begun or ended. Without the stream,
    /// no request may be sent to a pod that only the agent can thaw.
    fn handle_agent_stream(&mut self, reporter: &ComponentReplica, now: UnixMillis) {
        if reporter.role != ClientComponent::Agent {
            return;
        }
        let ObservedPods { reporters, silent_agents, .. } = &mut self.cluster.pods;
        if reporters.is_reporting(&reporter_id(reporter)) {
            silent_agents.remove(&reporter.node);
        } else {
            silent_agents.entry(reporter.node.clone()).or_insert(now);
        }
        for name in self.standby_apps.clone() {
            let app = self.cluster.apps.get(&name);
            let is_affected = |pod: &RevisionPod| {
                // The local node has one agent, and its pods have no status of Kubernetes.
                pod.kube_status.is_none() || pods::is_on_node(pod, &reporter.node)
            };
            if app.is_some_and(|app| app.pods().any(|(_, pod)| is_affected(pod))) {
                self.reconcile_app(&name, now);
            }
        }
    }

    /// Handles the deletion of the pod in which a reporter ran. Its reports of pods that are not ready are dropped,
    /// since it does not correct them. Its reports of ready pods stay: the kubelet reports when a pod stops being
    /// ready.
    pub(super) fn handle_reporter_lost(&mut self, reporter_id: &str, now: UnixMillis) {
        let Some(record) = self.pods_by_reporter.get(reporter_id) else { return };
        let is_not_ready =
            |uid: &&String| self.cluster.pods.reports.get(*uid).is_some_and(|it| !it.ready);
        let not_ready: Vec<String> = record.pods.iter().filter(is_not_ready).cloned().collect();
        self.forget_lost_record(reporter_id);
        for uid in not_ready {
            self.remove_pod_report(&uid, now);
        }
    }

    /// Forgets what only a stream of this reporter would correct, once it has neither a stream nor a pod. The next
    /// agent of the node confirms the pods that are left. An activator has named none, and its name never returns.
    fn forget_lost_record(&mut self, reporter_id: &str) {
        let reporters = &self.cluster.pods.reporters;
        if reporters.is_reporting(reporter_id) || reporters.is_expected(reporter_id) {
            return;
        }
        let Some(record) = self.pods_by_reporter.get_mut(reporter_id) else { return };
        // The end of any other pod may never be observed.
        record.retain_pods(|uid| self.pod_index.apps.contains_key(uid));
        if record.is_empty() {
            self.newest_forgotten_stream = self.newest_forgotten_stream.max(record.stream);
            self.pods_by_reporter.remove(reporter_id);
        }
    }

    /// Changes the reports of agents and activators. Plans the apps of the pods that are passed over by this change, or
    /// no longer.
    fn update_reporters(&mut self, now: UnixMillis, change: impl FnOnce(&mut ReporterStates)) {
        // Compared as a whole: a stream that ends may withdraw many, and a pod may still be passed over by others.
        let reporters = &mut self.cluster.pods.reporters;
        let before = reporters.passed_over_pods();
        change(reporters);
        let after = reporters.passed_over_pods();
        let changed = before.symmetric_difference(&after);
        let apps = changed.filter_map(|uid| self.pod_index.apps.get(uid).cloned());
        let apps: BTreeSet<NamespacedName> = apps.collect();
        apps.iter().for_each(|app| self.reconcile_app(app, now));
    }

    pub(super) fn handle_pod_passed_over(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        uid: &str,
        now: UnixMillis,
    ) {
        self.update_reporters(now, |all| all.pass_over(&reporter_id(reporter), stream, uid));
    }

    pub(super) fn handle_pod_used_again(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        uid: &str,
        now: UnixMillis,
    ) {
        self.update_reporters(now, |all| all.use_again(&reporter_id(reporter), stream, uid));
    }

    pub(super) fn handle_drain_ack(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        uid: &str,
        now: UnixMillis,
    ) {
        self.cluster.pods.reporters.acknowledge(&reporter_id(reporter), stream, uid);
        self.reconcile_app_of_draining_pod(uid, now);
    }

    pub(super) fn handle_drain_ack_withdrawn(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        uid: &str,
        now: UnixMillis,
    ) {
        self.cluster.pods.reporters.withdraw(&reporter_id(reporter), stream, uid);
        self.reconcile_app_of_draining_pod(uid, now);
    }

    fn reconcile_app_of_draining_pod(&mut self, uid: &str, now: UnixMillis) {
        let Some(app) = self.pod_index.apps.get(uid).cloned() else { return };
        if self.draining_apps.contains(&app) {
            self.reconcile_app(&app, now);
        }
    }

    /// Records that the activator names each service that it routes to some Revision, or the agent each service that
    /// awaits agents.
    pub(super) fn begin_routed(&mut self, reporter: &ComponentReplica, stream: u64) {
        self.cluster.pods.reporters.begin_routed_services(&reporter_id(reporter), stream);
    }

    /// Records that the activator routes the service to some Revision, or that the agent leads connects to it.
    pub(super) fn handle_service_routed(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        name: &NamespacedName,
        now: UnixMillis,
    ) {
        let reporters = &mut self.cluster.pods.reporters;
        reporters.add_routed_service(&reporter_id(reporter), stream, name);
        // A Route becomes ready only once all route its names. A plan for the report of each of a thousand agents would
        // change nothing before the last one.
        if !reporters.is_routed_by_all(reporter.role, name) {
            return;
        }
        let Some(app) = self.cluster.app_of_route_name(name) else { return };
        let waits = |app: &AppState| !app.conditions.is_true(ConditionType::RouteIngress);
        if self.cluster.apps.get(&app).is_some_and(|it| waits(it)) {
            self.reconcile_app(&app, now);
        }
    }

    /// Records that the reporter no longer routes the service, or reports it no more. A ready Route stays ready.
    pub(super) fn handle_service_not_routed(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        name: &NamespacedName,
    ) {
        self.cluster.pods.reporters.remove_routed_service(&reporter_id(reporter), stream, name);
    }

    /// Handles a report on a pod. It waits while the node of the pod is not known.
    pub(super) fn handle_pod_report(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        observation: PodObservation,
        now: UnixMillis,
    ) {
        let placement = self.pod_placement(&reporter.node, &observation.uid);
        // Checked first: a compromised agent must not be able to report pods of other nodes.
        if let ReporterPlacement::OtherNode(node) = placement {
            return self.refuse_report(&reporter.node, &observation.uid, &node);
        }
        let forgotten = self.newest_forgotten_stream;
        let record = record_of_stream(&mut self.pods_by_reporter, forgotten, reporter, stream);
        let Some(record) = record else { return };
        record.node.clone_from(&reporter.node);
        record.pods.insert(observation.uid.clone());
        if let Some(unconfirmed_pods) = &mut record.unconfirmed_pods {
            unconfirmed_pods.remove(&observation.uid);
        }
        match placement {
            ReporterPlacement::Unknown if record.unplaced_reports.len() < MAX_UNPLACED_REPORTS => {
                record.unplaced_reports.insert(observation.uid.clone(), observation);
            }
            // Beyond the bound, the report is dropped; the agent's next stream repeats it.
            ReporterPlacement::Unknown | ReporterPlacement::OtherNode(_) => {}
            ReporterPlacement::ReporterNode => self.store_pod_report(observation, now),
        }
    }

    /// Handles the first statement of a pod's node: earlier reports of the pod are applied or refused now.
    pub(super) fn apply_unplaced_reports(&mut self, uid: &str, now: UnixMillis) {
        let holds = |record: &&ReporterPods| record.unplaced_reports.contains_key(uid);
        // More than one agent may have reported the pod. Only that of its node may decide about it.
        let nodes: Vec<String> =
            self.pods_by_reporter.values().filter(holds).map(|it| it.node.clone()).collect();
        for node in nodes {
            let placement = self.pod_placement(&node, uid);
            let mut records = self.pods_by_reporter.values_mut().filter(|it| it.node == node);
            let Some(record) = records.find(|it| it.unplaced_reports.contains_key(uid)) else {
                continue;
            };
            match placement {
                ReporterPlacement::Unknown => {}
                ReporterPlacement::ReporterNode => {
                    if let Some(observation) = record.unplaced_reports.remove(uid) {
                        self.store_pod_report(observation, now);
                    }
                }
                ReporterPlacement::OtherNode(other) => {
                    record.unplaced_reports.remove(uid);
                    record.pods.remove(uid);
                    self.refuse_report(&node, uid, &other);
                }
            }
        }
    }

    /// Forgets the status and all reports of a pod that has ended.
    pub(super) fn forget_ended_pod(&mut self, uid: &str) {
        self.cluster.pods.statuses.remove(uid);
        self.cluster.pods.reports.remove(uid);
        self.cluster.pods.reporters.forget_pod(uid);
        let (reporters, forgotten) =
            (&self.cluster.pods.reporters, &mut self.newest_forgotten_stream);
        self.pods_by_reporter.retain(|reporter, record| {
            record.forget_pod(uid);
            let is_kept = !record.is_empty()
                || reporters.is_reporting(reporter)
                || reporters.is_expected(reporter);
            if !is_kept {
                // A late message of a forgotten stream must not create its record again.
                *forgotten = record.stream.max(*forgotten);
            }
            is_kept
        });
    }

    /// Stores a report, and plans the app if the report changes more than counts.
    fn store_pod_report(&mut self, observation: PodObservation, now: UnixMillis) {
        let Some(app) = self.pod_index.apps.get(&observation.uid).cloned() else { return };
        let (uid, idle) = (observation.uid.clone(), observation.in_flight == 0);
        let last_report = self.cluster.pods.reports.get(&uid);
        let had_standby = last_report.is_some_and(|it| it.standby.is_some());
        let has_standby = observation.standby.is_some();
        let changes_only_count = last_report.is_some_and(|report| {
            *report == PodObservation { in_flight: report.in_flight, ..observation.clone() }
        });
        // A workload sleeps only if all of its ports are counted. What is not reported does not keep it awake.
        let changes_counted_ports =
            last_report.is_none_or(|it| it.counts_all_ports) != observation.counts_all_ports;
        let changes_stop = last_report.is_some_and(|it| it.awaits_stop) != observation.awaits_stop;
        if observation.awaits_stop {
            self.stop_checks.add(&app, &uid);
        }
        // Most reports change only counts, which need no plan.
        let old_addresses = if changes_only_count {
            None
        } else {
            plan::serving_addresses(&self.cluster, &app, &uid)
        };
        self.cluster.pods.reports.insert(uid.clone(), observation);
        // After a restart, agents report every pod in a state that the kubelet has already reported.
        let needs_no_plan = changes_only_count
            || !changes_counted_ports
                && old_addresses.is_some()
                && old_addresses == plan::serving_addresses(&self.cluster, &app, &uid);
        let needs_standby_plan = || {
            had_standby != has_standby
                || (self.standby_apps.contains(&app)
                    && plan::needs_standby_plan(&self.cluster, &app, &uid))
        };
        if !needs_no_plan
            || changes_stop
            || (idle && self.draining_apps.contains(&app))
            || needs_standby_plan()
        {
            self.reconcile_app(&app, now);
        }
    }

    pub(super) fn handle_report_withdrawn(
        &mut self,
        reporter: &ComponentReplica,
        stream: u64,
        uid: &str,
        now: UnixMillis,
    ) {
        // An agent must not withdraw what another node's agent has reported.
        if let ReporterPlacement::OtherNode(node) = self.pod_placement(&reporter.node, uid) {
            return self.refuse_report(&reporter.node, uid, &node);
        }
        let forgotten = self.newest_forgotten_stream;
        let record = record_of_stream(&mut self.pods_by_reporter, forgotten, reporter, stream);
        let Some(record) = record else { return };
        record.pods.remove(uid);
        record.unplaced_reports.remove(uid);
        self.remove_pod_report(uid, now);
    }

    /// Handles a pod that its agent does not see: it does not serve, even if it was restored as serving.
    fn remove_pod_report(&mut self, uid: &str, now: UnixMillis) {
        let was_reported = self.cluster.pods.reports.remove(uid).is_some();
        let Some(name) = self.pod_index.apps.get(uid).cloned() else { return };
        let pods = self.cluster.apps.get_mut(&name).map(|app| &mut app.revisions);
        let mut pods = pods.into_iter().flatten().flat_map(|it| &mut it.pods);
        let restored = pods.find(|pod| *pod.uid == *uid).and_then(|it| it.restored_address.take());
        if was_reported || restored.is_some() {
            self.reconcile_app(&name, now);
        }
    }

    /// Returns the place of a pod, according to the API server, relative to an agent on `node`.
    fn pod_placement(&self, node: &str, uid: &str) -> ReporterPlacement {
        let app = self.pod_index.apps.get(uid).and_then(|app| self.cluster.apps.get(app));
        let pod = app.and_then(|app| app.pods().find(|(_, pod)| *pod.uid == *uid));
        match pod.map(|(_, pod)| pod.kube_status.as_deref()) {
            None => ReporterPlacement::Unknown,
            // Only pods of the local node have no status by a kubelet.
            Some(None) => ReporterPlacement::ReporterNode,
            Some(Some(status)) if status.node.is_empty() => ReporterPlacement::Unknown,
            Some(Some(status)) if *status.node == *node => ReporterPlacement::ReporterNode,
            Some(Some(status)) => ReporterPlacement::OtherNode(status.node.to_string()),
        }
    }

    /// Refuses a report of a pod on another node: the reporter could attract the pod's requests, or keep them from it.
    fn refuse_report(&mut self, from: &str, pod: &str, node: &str) {
        warn!(from, pod, node, "report refused: the pod runs on another node");
        self.effects.refused_reports += 1;
    }

    pub(super) fn reconcile_draining_apps(&mut self, now: UnixMillis) {
        for name in self.draining_apps.clone() {
            self.reconcile_app(&name, now);
        }
    }
}

/// Returns the identifier of a reporter, with its role: an agent and an activator may have the same name.
fn reporter_id(reporter: &ComponentReplica) -> String {
    reporters::reporter_id(reporter.role, &reporter.name)
}

/// Forgets the drain acknowledgements of pods that serve again or have ended.
pub(super) fn forget_revived_pods(
    cluster: &mut ClusterState,
    previous: &AppState,
    after: Option<&AppState>,
) {
    let drains = |pod: &RevisionPod| pod.stage != PodStage::Serving;
    for (_, pod) in previous.pods().filter(|(_, pod)| drains(pod)) {
        let mut left = after.iter().flat_map(|app| app.pods());
        if !left.any(|(_, it)| it.uid == pod.uid && drains(it)) {
            cluster.pods.reporters.forget_pod(&pod.uid);
        }
    }
}
