//! Shell: one replica of the controller on Kubernetes: watches, writes and webhook, with writes only under the Lease.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use common::{
    admin::AdminState, component::Component, log, once_signal::OnceSignal, wire::NamespacedName,
};
use serde_json::Value;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{error, info, warn};

use crate::{
    decide::{machine::ControllerEvent, pod_placement, wake_zone},
    model::object::ResourceKind,
    read::observe,
    shell::{
        api::{
            DesiredStateSource,
            client::{KubeClientError, connect},
            events,
            leader_election::{LeaderElector, Leadership},
            lease_state::LeaseTiming,
            metrics::ApiServerMetrics,
            watch_scope::{has_revision_label, list_position, watch_scopes},
            watches::{WatchUpdate, start_watches},
            write_queue::WriteLimits,
            writer::ObjectWriter,
        },
        config::KubernetesConfig,
        runtime::ControllerRuntime,
        webhook::{
            self, AdmissionContext, PodOrderCheck, PodPlacer, WebhookSettingsSource,
            admission_review::AdmissionSettings, certificates::WebhookCertResolver,
            configurations::WebhookAddress,
        },
    },
};

mod certificate_watches;
mod client_pods;
mod gateway_watches;
mod ingress_watches;
pub mod named_secrets;
mod pod_reads;
mod workloads;

/// Connection of the machine to the API server: watches, writer, leader election and webhook.
pub struct KubernetesPlatform {
    client: kube::Client,
    runtime: Arc<ControllerRuntime>,
    writer: Arc<ObjectWriter>,
    metrics: Arc<ApiServerMetrics>,
    system_namespace: String,
    pod_name: String,
    cluster_domain: String,
    /// Address at which the admission webhook listens, and its address for the API server.
    webhook: Option<(SocketAddr, WebhookAddress)>,
    /// Certificates with which the webhook serves.
    certificates: Arc<WebhookCertResolver>,
    /// True if this replica reads the Secrets that mappings and settings name.
    reads_secrets: bool,
    /// Set once all first lists are complete, and named Secrets were read or waited for.
    synced: OnceSignal,
    /// Labels of the watches whose first list is not complete.
    unlisted_scopes: Arc<Mutex<BTreeSet<String>>>,
    /// True once a NetworkPolicy selects pods, so that all pods are followed.
    needs_client_pods: tokio::sync::watch::Sender<bool>,
    /// Task of the leader election, which releases the Lease when it ends.
    election_task: Mutex<Option<JoinHandle<()>>>,
    /// Permission to write, once the leader election runs.
    leadership: Mutex<Option<Leadership>>,
    /// Ends the recorder of Events and the reader of single pods when dropped.
    _tasks: DropGuard,
}

/// Longest time for which a replica that starts waits for named Secrets before it sends routes.
const SECRET_WAIT: Duration = Duration::from_secs(5);
/// Longest time for which a replica that starts waits for the objects of the Gateway API before it sends routes.
const GATEWAY_LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which a replica becomes ready without a certificate for its webhook: it still sends routes.
const CERTIFICATE_WAIT: Duration = Duration::from_secs(60);
/// Time for which a stopping replica still serves its webhook. API servers send requests to it until the rules of its
/// Service have changed. A request without a response would refuse the write of a user.
const WEBHOOK_LINGER: Duration = Duration::from_secs(5);
/// Time limit for the last responses of the webhook after that. Both fit into the pod's grace period of 30 s.
const WEBHOOK_STOP_TIMEOUT: Duration = Duration::from_secs(15);

impl std::fmt::Debug for KubernetesPlatform {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("KubernetesPlatform").field("pod", &self.pod_name).finish_non_exhaustive()
    }
}

impl KubernetesPlatform {
    /// Connects to the API server. Watches and writes begin with [`run`](Self::run). Secrets that mappings and settings
    /// name are read only if `reads_secrets`, since their keys are sent with the routes.
    pub async fn new(
        cluster: &KubernetesConfig,
        shared: Arc<ControllerRuntime>,
        reads_secrets: bool,
    ) -> Result<Self, KubeClientError> {
        let client = connect(cluster.kubeconfig.as_deref()).await?;
        let metrics = Arc::new(ApiServerMetrics::default());
        let writer =
            ObjectWriter::new(client.clone(), WriteLimits::default(), Arc::clone(&metrics));
        let writer = Arc::new(writer);
        let stop = CancellationToken::new();
        let (events, event_recorder) = events::event_recorder(
            client.clone(),
            &cluster.pod,
            Arc::clone(&metrics),
            stop.clone(),
        );
        tokio::spawn(event_recorder);
        shared.set_writer(Arc::clone(&writer), events);
        let (reads_tx, reads_rx) = mpsc::channel(pod_reads::WAITING_READS_MAX);
        shared.set_pod_reader(reads_tx);
        let (reading_client, runtime) = (client.clone(), Arc::clone(&shared));
        tokio::spawn(pod_reads::read_pods(reading_client, runtime, reads_rx, stop.clone()));
        // From outside the cluster the webhook has a URL, and within it is named by its Service.
        let webhook_address = |address: SocketAddr| WebhookAddress {
            url: cluster.webhook_url.clone(),
            ..WebhookAddress::new(&cluster.system_namespace, address.port())
        };
        let scopes = watch_scopes(&cluster.system_namespace);
        let unlisted_scopes = scopes.iter().map(|it| it.label()).collect();
        Ok(Self {
            client,
            runtime: shared,
            writer,
            metrics,
            system_namespace: cluster.system_namespace.clone(),
            pod_name: cluster.pod.clone(),
            cluster_domain: cluster.cluster_domain.clone(),
            webhook: cluster.webhook.map(|address| (address, webhook_address(address))),
            certificates: Arc::default(),
            reads_secrets,
            synced: OnceSignal::new(),
            unlisted_scopes: Arc::new(Mutex::new(unlisted_scopes)),
            needs_client_pods: tokio::sync::watch::Sender::new(false),
            election_task: Mutex::default(),
            leadership: Mutex::default(),
            _tasks: stop.drop_guard(),
        })
    }

    /// Returns the client of the API server.
    pub fn client(&self) -> &kube::Client {
        &self.client
    }

    /// Returns true if a write may begin now.
    pub fn may_write(&self) -> bool {
        let leadership = self.leadership.lock().unwrap_or_else(PoisonError::into_inner);
        leadership.as_ref().is_some_and(Leadership::may_write)
    }

    /// Returns a signal that is set once all first lists are complete, and named Secrets were read or waited for.
    pub fn synced(&self) -> OnceSignal {
        self.synced.clone()
    }

    /// Adds to `admin` the metrics, and not-ready reasons until all lists are complete and the webhook has a
    /// certificate.
    pub fn extend_admin(&self, mut admin: AdminState) -> AdminState {
        self.metrics.register(&mut admin.registry);
        let unlisted = Arc::clone(&self.unlisted_scopes);
        let other_reasons = admin.not_ready_reasons;
        let (certificates, started) = (Arc::clone(&self.certificates), Instant::now());
        let (has_webhook, synced) = (self.webhook.is_some(), self.synced.clone());
        admin.not_ready_reasons = Box::new(move || {
            let unlisted = unlisted.lock().unwrap_or_else(PoisonError::into_inner);
            let waits = unlisted.iter().map(|it| format!("the first list of {it} is not complete"));
            let waits_for_more = (unlisted.is_empty() && !synced.is_set()).then(|| {
                "pods that network policies admit, workloads of scaled Services, requested certificates or Gateways \
                 are not listed yet, or named Secrets not read"
                    .to_owned()
            });
            // A certificate that never comes must not keep the replica unready: it still serves routes.
            let is_late = started.elapsed() > CERTIFICATE_WAIT;
            let has_no_certificate = has_webhook && !is_late && certificates.bundle().is_none();
            let no_certificate =
                has_no_certificate.then(|| "the webhook's certificate is not there yet".to_owned());
            let reasons = other_reasons().into_iter().chain(waits).chain(waits_for_more);
            reasons.chain(no_certificate).collect()
        });
        admin
    }

    /// Runs watches, leader election, writer and webhook until `shutdown`. The webhook ends a few seconds later.
    pub async fn run(&self, shutdown: CancellationToken) {
        let scopes = watch_scopes(&self.system_namespace);
        let mut updates = start_watches(&self.client, scopes, &self.metrics, &shutdown);
        if !self.apply_first_lists(&mut updates).await {
            return;
        }
        self.check_network_policies();
        let (clients_listed, workloads_listed) = (OnceSignal::new(), OnceSignal::new());
        let mut client_watch = std::pin::pin!(self.watch_client_pods(clients_listed.clone()));
        let mut workload_watch =
            std::pin::pin!(self.watch_workloads(workloads_listed.clone(), &shutdown));
        let (certificates_listed, gateways_listed) = (OnceSignal::new(), OnceSignal::new());
        let optional_kinds = async {
            let certificates = self.watch_certificates(certificates_listed.clone(), &shutdown);
            let gateways = self.watch_gateways(gateways_listed.clone(), &shutdown);
            tokio::join!(certificates, gateways, self.watch_ingresses(&shutdown));
        };
        let mut optional_watch = std::pin::pin!(optional_kinds);
        let later = [&clients_listed, &workloads_listed, &certificates_listed, &gateways_listed];
        tokio::select! {
            () = self.wait_for_later_lists(later) => {}
            () = client_watch.as_mut() => {}
            () = workload_watch.as_mut() => {}
            () = optional_watch.as_mut() => {}
            () = shutdown.cancelled() => return,
        }
        self.runtime.step(ControllerEvent::InitialListSynced);
        self.apply_log_level();
        info!("first lists complete");
        // Not before that step, which sends the first names.
        let secrets_read = OnceSignal::new();
        let mut secret_reads = std::pin::pin!(self.follow_named_secrets(secrets_read.clone()));
        tokio::select! {
            // New activators should not begin without certificates.
            () = wait_for_secrets(&secrets_read) => {}
            () = secret_reads.as_mut() => {}
            () = self.apply_watch_updates(&mut updates) => return,
            () = client_watch.as_mut() => {}
            () = workload_watch.as_mut() => {}
            () = optional_watch.as_mut() => {}
            () = shutdown.cancelled() => return,
        }
        self.synced.set();
        // The election starts only now: a leader that knows half of the objects would delete or recreate the others.
        let leadership = self.start_leader_election(&shutdown);
        let source = Arc::clone(&self.runtime) as Arc<dyn DesiredStateSource>;
        let writing = Arc::clone(&self.writer).run(source, leadership.clone(), shutdown.clone());
        let webhook_stop = CancellationToken::new();
        let mut webhook = std::pin::pin!(self.serve_webhook(leadership, &webhook_stop));
        tokio::select! {
            () = writing => {}
            // It ends only with `webhook_stop`.
            () = webhook.as_mut() => return,
            () = self.apply_watch_updates(&mut updates) => {}
            () = client_watch => {}
            () = workload_watch => {}
            () = optional_watch => {}
            () = secret_reads => {}
            () = shutdown.cancelled() => {}
        }
        if self.webhook.is_some() && shutdown.is_cancelled() {
            finish_webhook(webhook, &webhook_stop).await;
        }
    }

    /// Waits for the lists without which the first routes would be wrong, if they are needed.
    async fn wait_for_later_lists(
        &self,
        [clients_listed, workloads_listed, certificates_listed, gateways_listed]: [&OnceSignal; 4],
    ) {
        // A policy that names pods waits until these are known, and the first routes would admit all clients.
        if *self.needs_client_pods.borrow() {
            clients_listed.wait().await;
        }
        // The first routes would not have the scaled Services.
        if *self.runtime.workload_watch_need().borrow() {
            workloads_listed.wait().await;
        }
        // Hosts would lose their certificates, and Routes their conditions.
        if *self.runtime.request_watch_need().borrow() {
            certificates_listed.wait().await;
        }
        // Hosts of Gateways would be served no more until their objects are known. All other services must not wait for
        // kinds of which a cluster may have no usable version.
        if timeout(GATEWAY_LIST_TIMEOUT, gateways_listed.wait()).await.is_err() {
            warn!(
                "objects of the Gateway API are not listed yet: the first routes lack their hosts"
            );
        }
    }

    /// Serves the admission webhook. If that is impossible, everything else continues without it.
    async fn serve_webhook(&self, leadership: Leadership, shutdown: &CancellationToken) {
        if let Some((address, webhook_address)) = self.webhook.clone() {
            let (shared, domain) = (Arc::clone(&self.runtime), self.cluster_domain.clone());
            // Read at each request, so that a change of the ConfigMaps counts from the next one on.
            let settings: WebhookSettingsSource = Arc::new(move || {
                let prefers_wake_zone =
                    shared.with_machine(|machine| wake_zone::is_preference_on(machine.cluster()));
                let in_force = shared.settings();
                let of_configs = AdmissionSettings::from_configs(&in_force.config_maps, &domain);
                Arc::new(AdmissionSettings { prefers_wake_zone, ..of_configs })
            });
            let shared = Arc::clone(&self.runtime);
            let placer: PodPlacer = Arc::new(move |pod: &Value, chance| {
                let now = shared.now();
                shared.with_machine(|machine| {
                    pod_placement::place_pod(machine.cluster(), pod, chance, now)
                })
            });
            let shared = Arc::clone(&self.runtime);
            let order_check: PodOrderCheck = Arc::new(move |pod: &Value| {
                shared.with_machine(|machine| wake_zone::is_order_known(machine.cluster(), pod))
            });
            let client = self.client.clone();
            let context = AdmissionContext { settings, placer, order_check };
            let certificates = Arc::clone(&self.certificates);
            let webhook_address = (address, webhook_address);
            let run = webhook::run(
                client,
                webhook_address,
                certificates,
                leadership,
                context,
                shutdown.clone(),
            );
            // The replica goes on: it may still be the leader, and other replicas serve the webhook.
            if let Err(error) = run.await {
                let error = &error as &dyn std::error::Error;
                error!(error, "admission webhook failed");
            }
        }
        // An early return would end the other tasks of the platform as well.
        shutdown.cancelled().await;
    }

    /// Waits until the Lease is released.
    pub async fn wait_for_release(&self) {
        let election = self.election_task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(election) = election {
            // Only a panic could fail here, and that was logged.
            let _ = election.await;
        }
    }

    /// Starts the leader election, with the present times of `config-leader-election`. Later changes need a restart:
    /// two replicas that applied a change at different moments could both believe to be the leader.
    fn start_leader_election(&self, shutdown: &CancellationToken) -> Leadership {
        let times = LeaseTiming::from(&*self.runtime.settings().config_maps.leader_election);
        let (client, namespace) = (self.client.clone(), &self.system_namespace);
        info!(?times, "leader election started");
        let elector = LeaderElector::new(client, namespace, &self.pod_name, times);
        let leadership = elector.leadership();
        *self.leadership.lock().unwrap_or_else(PoisonError::into_inner) = Some(leadership.clone());
        let task = tokio::spawn(elector.run(shutdown.clone()));
        *self.election_task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
        leadership
    }

    /// Applies the first lists. The machine plans nothing on a part of them: it waits for
    /// [`ControllerEvent::InitialListSynced`]. Returns false if the watches ended before: this replica stops, and must
    /// not lead with a part of the objects.
    async fn apply_first_lists(&self, updates: &mut mpsc::Receiver<WatchUpdate>) -> bool {
        while !self.lock_unlisted_scopes().is_empty() {
            let Some(update) = updates.recv().await else { return false };
            self.apply_watch_update(update);
        }
        true
    }

    fn lock_unlisted_scopes(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.unlisted_scopes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the pods that NetworkPolicies may admit, once it is needed. Sets `listed` when all of them are known.
    async fn watch_client_pods(&self, listed: OnceSignal) {
        let needed = self.needs_client_pods.subscribe();
        let (client, runtime) = (self.client.clone(), Arc::clone(&self.runtime));
        client_pods::watch_client_pods(client, runtime, needed, listed).await;
        // It ends only if nothing is to be followed any more, which must not end this replica.
        std::future::pending().await
    }

    /// Sets the log level of this component; the others get theirs by the RouteTable.
    fn apply_log_level(&self) {
        let level = self.runtime.settings().config_maps.logging.levels().controller;
        log::set_level(Component::Controller, level);
    }

    fn check_network_policies(&self) {
        if self
            .runtime
            .with_machine(|machine| machine.cluster().network_policies.needs_client_pods())
        {
            self.needs_client_pods.send_replace(true);
        }
    }

    async fn apply_watch_updates(&self, updates: &mut mpsc::Receiver<WatchUpdate>) {
        while let Some(update) = updates.recv().await {
            self.apply_watch_update(update);
        }
    }

    /// Passes an update of a watch to the state machine and to the writer, in this order.
    fn apply_watch_update(&self, update: WatchUpdate) {
        match update {
            WatchUpdate::ListBegun(scope) => self.writer.begin_list(&scope),
            WatchUpdate::Object { resource, name, observed, object } => {
                // The machine comes first: the writer compares the observed state with what the machine now wants. The
                // objects that this condition leaves out are only written, and concern the cache alone.
                if list_position(resource).is_some() || is_read_partly(resource, &object) {
                    self.runtime.step(ControllerEvent::ObjectObserved {
                        resource,
                        name: name.clone(),
                        object: Some(object),
                    });
                }
                self.writer.handle_observed(resource, &name, observed);
                match resource {
                    ResourceKind::NetworkPolicy => self.check_network_policies(),
                    ResourceKind::ConfigMap => self.apply_log_level(),
                    _ => {}
                }
            }
            WatchUpdate::Deleted { scope, resource, name } => {
                if !self.writer.has_left(&scope, &name) {
                    self.apply_deletion(resource, &name);
                }
            }
            WatchUpdate::ListCompleted(scope) => {
                for name in self.writer.end_list(&scope) {
                    self.apply_deletion(scope.resource, &name);
                }
                self.lock_unlisted_scopes().remove(&scope.label());
            }
        }
    }

    /// Applies the deletion of an object, in the order of an observed object: the machine comes first. Otherwise the
    /// writer, on another thread, could find the object missing and still desired, and create a user's deleted Revision
    /// again.
    fn apply_deletion(&self, resource: ResourceKind, name: &NamespacedName) {
        let is_read_partly =
            matches!(resource, ResourceKind::PodAutoscaler | ResourceKind::HorizontalPodAutoscaler);
        if list_position(resource).is_some() || is_read_partly {
            self.runtime.step(ControllerEvent::ObjectObserved {
                resource,
                name: name.clone(),
                object: None,
            });
        }
        self.writer.handle_deleted(resource, name);
        if resource == ResourceKind::ConfigMap {
            self.apply_log_level();
        }
    }
}

/// Waits until `secrets_read` is set, for [`SECRET_WAIT`] at most.
async fn wait_for_secrets(secrets_read: &OnceSignal) {
    if timeout(SECRET_WAIT, secrets_read.wait()).await.is_err() {
        // Activators that run keep the certificates that they have; each of the others comes once its Secret is read.
        warn!("routes are sent before all named Secrets are read");
    }
}

/// Lets the webhook serve for [`WEBHOOK_LINGER`] more, then ends it by `stop` and waits for its last responses.
async fn finish_webhook(webhook: impl Future<Output = ()>, stop: &CancellationToken) {
    let ending = async {
        sleep(WEBHOOK_LINGER).await;
        stop.cancel();
    };
    let all = async { tokio::join!(ending, webhook) };
    if timeout(WEBHOOK_LINGER + WEBHOOK_STOP_TIMEOUT, all).await.is_err() {
        info!("webhook ended with open requests");
    }
}

/// Returns true for objects that the machine reads, of kinds of which only the writer reads the others.
///
/// - PodAutoscalers of the class HPA: the machine needs their UIDs for the HorizontalPodAutoscalers.
/// - PodAutoscalers of scaled Services: they record ports at the activators.
/// - HorizontalPodAutoscalers of users: they may keep the number of a scaled Service's pods.
fn is_read_partly(resource: ResourceKind, object: &Value) -> bool {
    match resource {
        ResourceKind::PodAutoscaler => {
            observe::is_hpa_class(object) || observe::is_scaled_autoscaler(object)
        }
        ResourceKind::HorizontalPodAutoscaler => !has_revision_label(object),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_gets_autoscalers_of_users_and_of_scaled_services() {
        let is_read = |resource, labels: Value| {
            is_read_partly(resource, &serde_json::json!({"metadata": {"labels": labels}}))
        };
        let of_revision = serde_json::json!({"serving.knative.dev/revisionUID": "u"});
        let of_service = serde_json::json!({"rouse.dev/scaled-service": "db"});
        let (autoscaler, hpa) =
            (ResourceKind::PodAutoscaler, ResourceKind::HorizontalPodAutoscaler);
        assert!(is_read(autoscaler, of_service) && !is_read(autoscaler, of_revision.clone()));
        assert!(is_read(hpa, Value::Null) && !is_read(hpa, of_revision));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stopping_replica_serves_its_webhook_a_moment_longer() {
        let stop = CancellationToken::new();
        let webhook = async {
            sleep(WEBHOOK_LINGER / 2).await;
            assert!(!stop.is_cancelled(), "API servers still send requests");
            stop.cancelled().await;
        };
        finish_webhook(webhook, &stop).await;
        assert!(stop.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_an_end_does_not_keep_a_replica_from_stopping() {
        finish_webhook(std::future::pending(), &CancellationToken::new()).await;
    }
}
