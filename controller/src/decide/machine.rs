//! Pure: events → cluster state → plan → effects. One step per event, which plans the apps that the event affects.
//!
//! The machine keeps the cluster state in step with its plan. After each event the affected app is planned and the plan
//! is applied to the cluster state. The RouteTable's outbox is updated at once; the effects on node, disk and API
//! server are left in [`ControllerEffects`].

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use common::{
    local_node::{self, PodRunStatus},
    outbox::Outbox,
    wire::{NamespacedName, RouteChange, RouteKey},
};
use smol_str::SmolStr;
use tracing::info;

use crate::{
    decide::plan,
    model::{
        cluster_state::{
            AppState, ClusterState, ConditionReason, CurrentDecision, RevisionPod, UnixMillis,
        },
        network_policies::PolicyClientPod,
        object::LocalObjectKey,
    },
};

mod allocate;
mod apply_plan;
mod blocking_causes;
mod certificates;
mod client_cas;
mod decisions;
mod deployments;
mod digests;
mod domain_mappings;
mod events;
mod fingerprint;
mod gateway_api;
mod ingresses;
mod leadership;
mod listed_hosts;
mod local_certificates;
mod manifests;
mod name_claims;
mod observe;
mod owner_exceptions;
mod pod_resizes;
mod pods;
mod replicas;
mod reports;
mod requested_certificates;
mod route_references;
mod scaled_services;
mod settings;
mod stop_checks;
mod timers;
mod write_keys;
mod zones;

use blocking_causes::{BlockedObject, BlockedPart, BlockingCause};
use certificates::UnnamedCertificate;
use client_cas::UnnamedClientCa;
use deployments::DeploymentFacts;
pub use digests::{DigestRequest, DigestResolution, PullAccount};
use events::ControllerEvent as Event;
pub use events::{CertificateCounts, ControllerEffects, ControllerEvent, ObjectEventRecord};
pub use fingerprint::{RouteFingerprint, RouteMessageBatch};
pub use settings::ConfigMapEventRecord;
pub use stop_checks::{PodRead, PodReadResult};
use timers::AppTimers;

/// Objects of an app that the local platform stores after a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectsToStore {
    /// Only objects that the plan changes.
    Changed,
    /// All objects: the event may have changed any of them.
    All,
}

/// Index of the observed pods.
#[derive(Debug, Default)]
struct PodIndex {
    /// App of each pod, by the pod's UID.
    apps: HashMap<String, NamespacedName>,
    /// UIDs of the observed pods, by name.
    uids: BTreeMap<NamespacedName, Box<str>>,
    /// Pods that were observed before their Revision, by the Revision's name and the pod's.
    without_revision: BTreeMap<NamespacedName, BTreeMap<NamespacedName, RevisionPod>>,
}

/// State machine that is the controller's core.
#[derive(Debug)]
pub struct ControllerStateMachine {
    cluster: ClusterState,
    routes: Outbox<RouteKey, RouteFingerprint>,
    /// Pods, by UID and by name.
    pod_index: PodIndex,
    /// True before [`ControllerEvent::InitialListSynced`]: nothing is planned while a part of the objects is unknown.
    is_loading: bool,
    /// Pods that each reporter has named, by reporter.
    pods_by_reporter: BTreeMap<String, reports::ReporterPods>,
    /// Largest number of a stream of reports whose reporter has no record in `pods_by_reporter` any more.
    newest_forgotten_stream: u64,
    /// Scale decisions on Revisions that are not observed yet.
    pending_decisions: BTreeMap<NamespacedName, CurrentDecision>,
    /// Revisions that the current stream of decisions has not named yet.
    unconfirmed_decisions: Option<BTreeSet<NamespacedName>>,
    /// Reasons for which parts of apps cannot become as desired.
    blocking_causes: BTreeMap<BlockedObject, BTreeMap<BlockingCause, ConditionReason>>,
    /// Deployments that were observed before their Revision, by name.
    early_deployments: BTreeMap<NamespacedName, DeploymentFacts>,
    /// Apps that have draining pods.
    draining_apps: BTreeSet<NamespacedName>,
    /// Apps with pods that stand by or are to do so.
    standby_apps: BTreeSet<NamespacedName>,
    /// Apps whose objects may not follow the present settings yet.
    apps_to_rewrite: VecDeque<NamespacedName>,
    /// Events on ConfigMaps that this replica records only if it becomes the leader.
    unrecorded_events: BTreeMap<NamespacedName, Vec<ConfigMapEventRecord>>,
    /// True once a scaled Service, or something of one, was observed.
    needs_workload_watch: bool,
    /// Checks of pods whose kubelets have asked to stop a container.
    stop_checks: stop_checks::StopChecks,
    /// Certificates of Secrets that were named a short time ago, and are no longer.
    unnamed_certificates: BTreeMap<NamespacedName, UnnamedCertificate>,
    /// Moment up to which certificates that begin or cease to be valid have changed conditions.
    validities_checked_at: UnixMillis,
    /// Authorities of Secrets that were named a short time ago, and are no longer.
    unnamed_client_cas: BTreeMap<NamespacedName, UnnamedClientCa>,
    /// Number of certificates for names inside the cluster that were requested so far.
    local_requests: u64,
    /// Services that have begun or ended in this step to want a certificate for their names inside the cluster.
    changed_local_certificates: BTreeSet<NamespacedName>,
    /// Number of apps created so far; part of each new UID.
    apps_created: u64,
    timers: AppTimers,
    effects: ControllerEffects,
}

impl ControllerStateMachine {
    /// Returns a machine for `cluster` that writes to the outbox `routes`.
    pub fn new(cluster: ClusterState, routes: Outbox<RouteKey, RouteFingerprint>) -> Self {
        // Fixed activators come from the configuration, so no event announces them.
        for activator in &cluster.settings.fixed_activators {
            let key = RouteKey::Activator(activator.name.clone());
            routes
                .set(key, RouteFingerprint::of_change(&RouteChange::Activator(activator.clone())));
        }
        Self {
            cluster,
            routes,
            pod_index: PodIndex::default(),
            is_loading: false,
            pods_by_reporter: BTreeMap::new(),
            newest_forgotten_stream: 0,
            pending_decisions: BTreeMap::new(),
            unconfirmed_decisions: None,
            blocking_causes: BTreeMap::new(),
            early_deployments: BTreeMap::new(),
            draining_apps: BTreeSet::new(),
            standby_apps: BTreeSet::new(),
            apps_to_rewrite: VecDeque::new(),
            unrecorded_events: BTreeMap::new(),
            needs_workload_watch: false,
            stop_checks: stop_checks::StopChecks::default(),
            unnamed_certificates: BTreeMap::new(),
            validities_checked_at: UnixMillis(0),
            unnamed_client_cas: BTreeMap::new(),
            local_requests: 0,
            changed_local_certificates: BTreeSet::new(),
            apps_created: 0,
            timers: AppTimers::default(),
            effects: ControllerEffects::default(),
        }
    }

    /// Delays all planning until [`ControllerEvent::InitialListSynced`].
    #[must_use]
    pub fn loading(self) -> Self {
        Self { is_loading: true, ..self }
    }

    fn handle_initial_list(&mut self, now: UnixMillis) {
        self.is_loading = false;
        self.cluster.is_starting = true;
        self.update_activator_reports();
        self.cluster.nodes.zone_shares = self.cluster.nodes.current_zone_shares();
        self.rebuild_owner_exceptions();
        // The plans below are made with the certificates of this moment.
        self.validities_checked_at = now;
        self.set_first_named_secrets(now);
        self.set_first_named_client_cas(now);
        // Owners of names first: a plan depends on the names that the app owns.
        self.reconcile_claimants(now);
        for name in self.cluster.apps.keys().cloned().collect::<Vec<_>>() {
            self.reconcile_changed_app(&name, None, ObjectsToStore::All, now);
        }
        self.reconcile_all_mappings(now);
        self.update_reserved_hosts(self.mapped_hosts());
        self.follow_gateways(now);
        self.check_abandoned_workloads();
        self.cluster.is_starting = false;
    }

    /// Returns the cluster state as it is now.
    pub fn cluster(&self) -> &ClusterState {
        &self.cluster
    }

    /// Returns the RouteTable's outbox.
    pub fn routes(&self) -> &Outbox<RouteKey, RouteFingerprint> {
        &self.routes
    }

    /// Returns the time at which the next [`ControllerEvent::Tick`] is due.
    pub fn next_timer(&self) -> Option<UnixMillis> {
        self.timers.next_due()
    }

    /// Handles one event and returns its effects.
    pub fn step(&mut self, now: UnixMillis, event: ControllerEvent) -> ControllerEffects {
        self.handle_event(event, now);
        // Any event may have moved a name to another owner, or made a Revision known that was already decided on.
        self.reconcile_claimants(now);
        self.apply_pending_decisions(now);
        self.pass_local_certificates();
        self.effects.needs_workload_watch = self.needs_workload_watch;
        self.effects.needs_request_watch = plan::requested_certificates::is_enabled(&self.cluster);
        std::mem::take(&mut self.effects)
    }

    /// Passes an event to the function for its kind.
    #[allow(clippy::too_many_lines, reason = "one arm for each event")]
    fn handle_event(&mut self, event: Event, now: UnixMillis) {
        match event {
            Event::ManifestApplied { name, manifest } => self.apply_manifest(name, manifest, now),
            Event::ManifestRefused { name, reason } => self.refuse_manifest(name, &reason, now),
            Event::ManifestDeleted(name) => self.delete_app(&name, now),
            Event::AppRestored { name, app } => self.restore_app(name, *app, now),
            Event::DecisionReceived(decision) => self.handle_decision(decision, now),
            Event::DecisionWithdrawn(revision) => self.handle_decision_withdrawn(&revision, now),
            Event::DecisionStreamBegin => self.handle_decision_stream_begin(),
            Event::DecisionStreamSynced => self.handle_decision_stream_synced(now),
            Event::ReportStreamBegin { reporter, stream } => {
                self.handle_report_stream_begin(&reporter, stream, now)
            }
            Event::PodReported { reporter, stream, observation } => {
                self.handle_pod_report(&reporter, stream, observation, now)
            }
            Event::PodReportWithdrawn { reporter, stream, pod_uid } => {
                self.handle_report_withdrawn(&reporter, stream, &pod_uid, now)
            }
            Event::DrainAcked { reporter, stream, pod_uid } => {
                self.handle_drain_ack(&reporter, stream, &pod_uid, now)
            }
            Event::DrainAckWithdrawn { reporter, stream, pod_uid } => {
                self.handle_drain_ack_withdrawn(&reporter, stream, &pod_uid, now)
            }
            Event::RoutedServicesBegin { reporter, stream } => self.begin_routed(&reporter, stream),
            Event::ServiceRouted { reporter, stream, service } => {
                self.handle_service_routed(&reporter, stream, &service, now)
            }
            Event::ServiceNoLongerRouted { reporter, stream, service } => {
                self.handle_service_not_routed(&reporter, stream, &service)
            }
            Event::PodPassedOver { reporter, stream, pod_uid } => {
                self.handle_pod_passed_over(&reporter, stream, &pod_uid, now)
            }
            Event::PodUsedAgain { reporter, stream, pod_uid } => {
                self.handle_pod_used_again(&reporter, stream, &pod_uid, now)
            }
            Event::ReportStreamSynced { reporter, stream } => {
                self.handle_report_stream_synced(&reporter, stream, now)
            }
            Event::ReportStreamEnd { reporter, stream } => {
                self.handle_report_stream_end(&reporter, stream, now)
            }
            Event::DigestsResolved { revision, resolution } => {
                self.handle_digests_resolved(&revision, resolution, now)
            }
            Event::ActiveReplicaChanged { component, replica } => {
                self.set_active_replica(component, replica)
            }
            Event::PodRunStatus(status) => self.handle_pod_status(status, now),
            Event::ObjectObserved { resource, name, object } => {
                self.observe_object(resource, name, object.as_deref(), now);
            }
            Event::PodReadEnded { read, result } => self.handle_pod_read(&read, result, now),
            Event::ClientPodObserved { name, pod } => self.handle_client_pod(name, pod, now),
            Event::ClientPodsListed => self.handle_client_list(now),
            Event::WorkloadsListed => self.handle_workload_list(now),
            Event::WriteErrorChanged { key, error } => self.handle_write_error(&key, error, now),
            Event::ChildrenMissing { app, owner_resource, owner, error } => {
                self.handle_missing_children(app, owner_resource, &owner, error, now)
            }
            Event::SecretRead { name, read } => self.handle_secret_read(&name, read, now),
            Event::ClientCaRead { name, read } => self.handle_client_ca_read(&name, read, now),
            Event::LocalCertificateSigned { service, material } => {
                self.handle_local_certificate(&service, material, now)
            }
            Event::LocalSigningFailed { services, reason } => {
                self.handle_local_signing_failure(&services, &reason, now)
            }
            Event::CertManagerFound(is_present) => {
                self.handle_cert_manager_presence(is_present, now)
            }
            Event::IngressesListed => self.handle_ingress_list(now),
            Event::InitialListSynced => self.handle_initial_list(now),
            Event::LeadershipChanged(is_leader) => self.handle_leadership(is_leader, now),
            Event::Tick => self.handle_tick(now),
        }
    }

    fn handle_client_pod(
        &mut self,
        name: NamespacedName,
        client: Option<PolicyClientPod>,
        now: UnixMillis,
    ) {
        let changed_apps = self.cluster.network_policies.set_client(name, client);
        self.reconcile_namespaces(&changed_apps, now);
    }

    fn handle_client_list(&mut self, now: UnixMillis) {
        let changed_apps = self.cluster.network_policies.set_clients_known();
        self.reconcile_namespaces(&changed_apps, now);
    }

    fn restore_app(&mut self, name: NamespacedName, mut app: AppState, now: UnixMillis) {
        // Templates from disk are equal but separate; shared, each is in memory only once.
        let templates = app.revisions.iter_mut().map(|it| &mut it.template);
        let templates = templates.chain(app.service.as_mut().map(|it| &mut it.manifest.template));
        for template in templates.chain(app.configuration.as_mut().map(|it| &mut it.template)) {
            *template = self.cluster.template_cache.intern(template);
        }
        allocate::reserve_restored(&app, &mut self.cluster);
        self.update_owner_exceptions(&name, None, Some(&app));
        self.cluster.apps.insert(name.clone(), Box::new(app));
        self.reconcile_changed_app(&name, None, ObjectsToStore::All, now);
    }

    fn handle_pod_status(&mut self, status: PodRunStatus, now: UnixMillis) {
        let Some(app) = self.pod_index.apps.get(&status.uid).cloned() else { return };
        let (uid, is_removed) =
            (status.uid.clone(), status.phase == local_node::PodRunPhase::Removed);
        let previous = self.cluster.pods.statuses.get(&uid);
        if previous == Some(&status) {
            return;
        }
        info!(pod = uid, phase = ?status.phase, "pod status");
        self.cluster.pods.statuses.insert(uid.clone(), status);
        self.effects.changed_objects.extend(self.pod_object_key(&app, &uid));
        self.reconcile_app(&app, now);
        // The plan above still needed the last status, to see that the pod ended.
        if is_removed {
            self.forget_ended_pod(&uid);
        }
    }

    fn pod_object_key(&self, app: &NamespacedName, uid: &str) -> Option<LocalObjectKey> {
        let mut pods = self.cluster.apps.get(app)?.pods();
        let (_, pod) = pods.find(|(_, pod)| *pod.uid == *uid)?;
        Some(LocalObjectKey::pod(&app.namespace, &pod.name))
    }

    fn handle_tick(&mut self, now: UnixMillis) {
        while let Some(name) = self.timers.pop_due(now) {
            // The empty name is the timer of rewrites, which belongs to no app.
            if name == settings::REWRITE_TIMER_KEY {
                self.rewrite_next_apps(now);
                continue;
            }
            if name == stop_checks::STOP_CHECK_TIMER_KEY {
                self.repeat_pod_reads(now);
                continue;
            }
            if name == certificates::CERTIFICATE_TIMER_KEY {
                self.handle_certificate_timer(now);
                continue;
            }
            self.reconcile_app(&name, now);
        }
    }

    /// Plans one app that the event has not changed, and the apps whose Routes name its Revisions.
    fn reconcile_app(&mut self, name: &NamespacedName, now: UnixMillis) {
        self.reconcile_changed_app(name, None, ObjectsToStore::Changed, now);
    }

    /// Plans one app, and the apps whose Routes name its Revisions. `previous` is the app before the event changed it;
    /// `None`: the event has not changed it, or has created it.
    fn reconcile_changed_app(
        &mut self,
        name: &NamespacedName,
        previous: Option<&AppState>,
        to_store: ObjectsToStore,
        now: UnixMillis,
    ) {
        // Nearly always there is no mapping, and then no copy of the app is needed.
        let has_mappings = !self.cluster.domains.mappings_by_target.is_empty();
        let app = previous.or_else(|| self.cluster.apps.get(name).map(|it| &**it));
        let app = app.filter(|_| has_mappings).cloned();
        self.plan_and_apply(name, previous, to_store, now);
        if let Some(app) = app {
            self.reconcile_mappings_of_app(name, &app, now);
        }
        let Some(referring_apps) = self.cluster.names.referring_apps.get(name).cloned() else {
            return;
        };
        for other in referring_apps {
            self.plan_unchanged_app(&other, now);
        }
        // The routing labels of this app's Revisions depend on the targets of those Routes.
        self.plan_unchanged_app(name, now);
    }

    fn plan_unchanged_app(&mut self, name: &NamespacedName, now: UnixMillis) {
        self.plan_and_apply(name, None, ObjectsToStore::Changed, now);
    }

    /// Plans every app of these namespaces.
    fn reconcile_namespaces(&mut self, namespaces: &BTreeSet<SmolStr>, now: UnixMillis) {
        for namespace in namespaces {
            let from = self.cluster.apps.range(NamespacedName::new(namespace.clone(), "")..);
            let apps = from.map(|(name, _)| name).take_while(|it| it.namespace == *namespace);
            for name in apps.cloned().collect::<Vec<_>>() {
                self.reconcile_app(&name, now);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
