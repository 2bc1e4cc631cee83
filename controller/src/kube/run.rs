//! Shell: one replica of the controller on Kubernetes: watches in, writes out, under one Lease.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use common::{
    admin::AdminState,
    log::{self, LogComponent},
    wire::NamespacedName,
};
use serde_json::Value;
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{error, info};

use super::{
    DesiredStateSource,
    client::{KubeClientError, connect},
    clients, events,
    lead::{LeaderElector, Leadership},
    lease::LeaseTiming,
    metrics::ApiServerMetrics,
    queue::WriteLimits,
    scope::{place, scopes},
    watch::{WatchUpdate, watch},
    writer::ObjectWriter,
};
use crate::{
    bind,
    children::ResourceKind,
    config::KubernetesConfig,
    machine::ControllerEvent,
    observe,
    shared::ControllerRuntime,
    webhook::{
        self, AdmissionContext, PodBinder, WebhookSettingsSource, certs::WebhookCertResolver,
        register::WebhookAddress, review,
    },
};

/// Connection of the machine to the API server: watches, writer, leader election and webhook.
pub struct KubernetesPlatform {
    client: kube::Client,
    shared: Arc<ControllerRuntime>,
    writer: Arc<ObjectWriter>,
    metrics: Arc<ApiServerMetrics>,
    system_namespace: String,
    pod: String,
    cluster_domain: String,
    /// Address of the admission webhook, and the place where the API server finds it.
    webhook: Option<(SocketAddr, WebhookAddress)>,
    /// Certificates with which the webhook serves.
    certificates: Arc<WebhookCertResolver>,
    synced: CancellationToken,
    /// Labels of the watches whose first list is not complete.
    missing: Arc<Mutex<BTreeSet<String>>>,
    /// True once a NetworkPolicy selects pods, so that all pods are followed.
    needs_clients: tokio::sync::watch::Sender<bool>,
    /// Task of the leader election, which releases the Lease when it ends.
    candidate: Mutex<Option<JoinHandle<()>>>,
    /// Permission to write, once the leader election runs.
    lead: Mutex<Option<Leadership>>,
    /// Ends the recorder of Events when dropped.
    _telling: DropGuard,
}

/// Time after which a replica becomes ready without a certificate for its webhook: it still sends routes.
const CERTIFICATE_WITHIN: Duration = Duration::from_secs(60);

impl std::fmt::Debug for KubernetesPlatform {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Platform").field("pod", &self.pod).finish_non_exhaustive()
    }
}

impl KubernetesPlatform {
    /// Connects to the API server; nothing is watched or written yet.
    pub async fn new(
        cluster: &KubernetesConfig,
        shared: Arc<ControllerRuntime>,
    ) -> Result<Self, KubeClientError> {
        let client = connect(cluster.kubeconfig.as_deref()).await?;
        let metrics = Arc::new(ApiServerMetrics::default());
        let writer =
            ObjectWriter::new(client.clone(), WriteLimits::default(), Arc::clone(&metrics));
        let writer = Arc::new(writer);
        let stop = CancellationToken::new();
        let (events, telling) =
            events::recorder(client.clone(), &cluster.pod, Arc::clone(&metrics), stop.clone());
        tokio::spawn(telling);
        shared.write_to(Arc::clone(&writer), events);
        let place = |address: SocketAddr| WebhookAddress {
            url: cluster.webhook_url.clone(),
            ..WebhookAddress::new(&cluster.system_namespace, address.port())
        };
        // A watch is removed from this set once its first list is complete.
        let missing = scopes(&cluster.system_namespace).iter().map(|it| it.label()).collect();
        Ok(Self {
            client,
            shared,
            writer,
            metrics,
            system_namespace: cluster.system_namespace.clone(),
            pod: cluster.pod.clone(),
            cluster_domain: cluster.cluster_domain.clone(),
            webhook: cluster.webhook.map(|address| (address, place(address))),
            certificates: Arc::default(),
            synced: CancellationToken::new(),
            missing: Arc::new(Mutex::new(missing)),
            needs_clients: tokio::sync::watch::Sender::new(false),
            candidate: Mutex::default(),
            lead: Mutex::default(),
            _telling: stop.drop_guard(),
        })
    }

    /// Returns the client of the API server.
    pub fn client(&self) -> &kube::Client {
        &self.client
    }

    /// Returns true if a write may begin now.
    pub fn may_write(&self) -> bool {
        let lead = self.lead.lock().unwrap_or_else(PoisonError::into_inner);
        lead.as_ref().is_some_and(Leadership::may_write)
    }

    /// Returns a token that is cancelled once all first lists are complete.
    pub fn synced(&self) -> CancellationToken {
        self.synced.clone()
    }

    /// Adds to `admin` the metrics, and not-ready reasons until all lists are complete and the webhook has a
    /// certificate.
    pub fn admin(&self, mut admin: AdminState) -> AdminState {
        self.metrics.register(&mut admin.registry);
        let (missing, before) = (Arc::clone(&self.missing), admin.troubles);
        let (certificates, started) = (Arc::clone(&self.certificates), Instant::now());
        let is_asked = self.webhook.is_some();
        admin.troubles = Box::new(move || {
            let missing = missing.lock().unwrap_or_else(PoisonError::into_inner);
            let waits = missing.iter().map(|it| format!("{it} are not all known yet"));
            // A certificate that never comes must not keep the replica unready: it still serves routes.
            let is_late = started.elapsed() > CERTIFICATE_WITHIN;
            let mute = is_asked && !is_late && certificates.bundle().is_none();
            let mute = mute.then(|| "the webhook's certificate is not there yet".to_owned());
            before().into_iter().chain(waits).chain(mute).collect()
        });
        admin
    }

    /// Runs watches, leader election, writer and webhook until `shutdown`.
    pub async fn run(&self, shutdown: CancellationToken) {
        let mut news = watch(&self.client, &self.system_namespace, &self.metrics, &shutdown);
        self.begin(&mut news).await;
        self.shared.step(ControllerEvent::Known);
        self.follow_level();
        info!("everything is known");
        self.synced.cancel();
        // Only now, since a leader that knows half of the objects would delete or recreate the others.
        let lead = self.stand(&shutdown);
        let source: Arc<dyn DesiredStateSource> =
            Arc::clone(&self.shared) as Arc<dyn DesiredStateSource>;
        let writing = Arc::clone(&self.writer).run(source, lead.clone(), shutdown.clone());
        tokio::select! {
            () = writing => {}
            () = self.answer(lead, &shutdown) => {}
            () = self.follow(&mut news) => {}
            () = self.follow_clients() => {}
            () = shutdown.cancelled() => {}
        }
    }

    /// Serves the admission webhook. If that is impossible, everything else continues without it.
    async fn answer(&self, lead: Leadership, shutdown: &CancellationToken) {
        if let Some((address, place)) = self.webhook.clone() {
            let (shared, domain) = (Arc::clone(&self.shared), self.cluster_domain.clone());
            let settings: WebhookSettingsSource = Arc::new(move || {
                Arc::new(review::AdmissionSettings::of(&shared.settings().configs, &domain))
            });
            let shared = Arc::clone(&self.shared);
            let binder: PodBinder = Arc::new(move |pod: &Value, chance| {
                let now = shared.now();
                shared.look(|it| bind::place(it.world(), pod, chance, now).map(str::to_owned))
            });
            let (client, answers) = (self.client.clone(), AdmissionContext { settings, binder });
            let certificates = Arc::clone(&self.certificates);
            let place = (address, place);
            let run = webhook::run(client, place, certificates, lead, answers, shutdown.clone());
            if let Err(error) = run.await {
                let error = &error as &dyn std::error::Error;
                error!(error, "admission questions are not answered");
            }
        }
        shutdown.cancelled().await;
    }

    /// Waits until the Lease is released.
    pub async fn ended(&self) {
        let candidate = self.candidate.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(candidate) = candidate {
            // Only a panic could fail here, and that was logged.
            let _ = candidate.await;
        }
    }

    /// Starts the leader election, with the present times of `config-leader-election`. Later changes need a restart:
    /// two replicas that applied a change at different moments could both believe to be the leader.
    fn stand(&self, shutdown: &CancellationToken) -> Leadership {
        let times = LeaseTiming::from(&*self.shared.settings().configs.leader_election);
        let (client, namespace) = (self.client.clone(), &self.system_namespace);
        info!(?times, "stands for the lease");
        let candidate = LeaderElector::new(client, namespace, &self.pod, times);
        let lead = candidate.leadership();
        *self.lead.lock().unwrap_or_else(PoisonError::into_inner) = Some(lead.clone());
        let task = tokio::spawn(candidate.run(shutdown.clone()));
        *self.candidate.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
        lead
    }

    /// Applies the first lists. The machine plans nothing on a part of them: it waits for [`ControllerEvent::Known`].
    async fn begin(&self, news: &mut mpsc::Receiver<WatchUpdate>) {
        while !self.missing().is_empty() {
            let Some(observed) = news.recv().await else { return };
            self.take(observed);
        }
    }

    fn missing(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn follow_clients(&self) {
        let needed = self.needs_clients.subscribe();
        clients::follow(self.client.clone(), Arc::clone(&self.shared), needed).await;
        // It ends only if nothing is to be followed any more, which must not end this replica.
        std::future::pending().await
    }

    /// Sets the log level of this component; the others get theirs by the RouteTable.
    fn follow_level(&self) {
        let level = self.shared.settings().configs.logging.levels().controller;
        log::set(LogComponent::Controller, level);
    }

    fn note_policies(&self) {
        if self.shared.look(|machine| machine.world().network_policies.needs_clients()) {
            self.needs_clients.send_replace(true);
        }
    }

    async fn follow(&self, news: &mut mpsc::Receiver<WatchUpdate>) {
        self.note_policies();
        while let Some(observed) = news.recv().await {
            self.take(observed);
        }
    }

    fn take(&self, observed: WatchUpdate) {
        match observed {
            WatchUpdate::Begin(scope) => self.writer.begin(&scope),
            WatchUpdate::Object(resource, name, seen, object) => {
                // The machine comes first: the writer compares the observed state with what the machine now wants. The
                // kinds that this condition leaves out are only written, and concern the cache alone.
                if place(resource).is_some() || owns_another(resource, &object) {
                    self.shared.step(ControllerEvent::Observe(
                        resource,
                        name.clone(),
                        Some(object),
                    ));
                }
                self.writer.see(resource, &name, seen);
                match resource {
                    ResourceKind::NetworkPolicy => self.note_policies(),
                    ResourceKind::ConfigMap => self.follow_level(),
                    _ => {}
                }
            }
            WatchUpdate::Gone(resource, name) => {
                self.writer.lose(resource, &name);
                self.lose(resource, name);
            }
            WatchUpdate::Synced(scope) => {
                for name in self.writer.synced(&scope) {
                    self.lose(scope.resource, name);
                }
                self.missing().remove(&scope.label());
            }
        }
    }

    fn lose(&self, resource: ResourceKind, name: NamespacedName) {
        if place(resource).is_some() || resource == ResourceKind::PodAutoscaler {
            self.shared.step(ControllerEvent::Observe(resource, name, None));
        }
        if resource == ResourceKind::ConfigMap {
            self.follow_level();
        }
    }
}

/// Returns true for a kind that is otherwise only written if a child object is made for this object.
fn owns_another(resource: ResourceKind, object: &Value) -> bool {
    resource == ResourceKind::PodAutoscaler && observe::is_horizontal(object)
}
