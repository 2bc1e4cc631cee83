//! Controller: Knative objects → pods, statuses and routes.
//!
//! Reading order: [`model::cluster_state`] (observed state), [`decide::plan`] (desired state), [`decide::machine`] (one
//! event at a time), then [`shell`]. There are five layers. A layer imports only itself and those above it in this
//! table.
//!
//! | layer | content |
//! |---|---|
//! | [`model`] | kinds, keys and names of objects, Knative's types, settings, cluster state |
//! | [`read`] | manifests, observed objects and stored objects → types of the model, or every broken rule |
//! | [`decide`] | cluster state → plan of each app, routes, keys of changed objects; the state machine |
//! | [`write`](mod@write) | cluster state → bodies of objects: child objects, statuses, CustomResourceDefinitions |
//! | [`shell`] | clock, disk, gRPC, API server, webhook, registries |
#![forbid(unsafe_code)]

use std::sync::Arc;

use common::{
    admin as pages,
    component::Component,
    link::LinkError,
    outbox::Outbox,
    tls::peer::{CertificateIdentity, CertificateIdentityError},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

pub mod decide;
pub mod model;
pub mod read;
pub mod shell;
pub mod write;

use crate::{
    decide::machine::ControllerStateMachine,
    model::cluster_state::{self, ClusterState, ControllerSettings, PlatformKind},
    shell::{
        admin, api, config, grpc_services,
        identity::{
            CertificateIssuer, authority_store::AuthorityManager, cluster_api::IdentityApiClient,
            local_signer::LocalCertificateSigner,
        },
        image_digests::resolver::DigestResolver,
        local_files, local_node, platform,
        runtime::ControllerRuntime,
    },
};
pub use shell::config::ControllerConfig;

/// Error that ends the controller.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The configuration is invalid.
    #[error("cannot start the controller")]
    Config(#[from] config::ControllerConfigError),
    /// Routes could not be served.
    #[error("cannot serve routes")]
    Link(#[from] LinkError),
    /// Manifests or objects could not be read or written.
    #[error("cannot keep objects")]
    Files(#[from] local_files::LocalFilesError),
    /// The API server cannot be used.
    #[error("cannot use Kubernetes")]
    Kubernetes(#[from] api::client::KubeClientError),
    /// The controller's identity cannot be formed from its node and pod names.
    #[error("cannot name this controller")]
    Identity(#[from] CertificateIdentityError),
    /// Health and metrics could not be served.
    #[error("cannot serve health and metrics")]
    Admin(#[from] pages::AdminError),
}

/// Runs the controller with a local node until `shutdown`.
pub async fn run(
    config: ControllerConfig,
    node: local_node::LocalNodeChannels,
    shutdown: CancellationToken,
) -> Result<(), ControllerError> {
    config.validate()?;
    // The end of this function, for any reason, also ends the tasks it started.
    let shutdown = shutdown.child_token();
    let _ended = shutdown.clone().drop_guard();
    let settings = config.to_settings(boot_id());
    let state = ClusterState {
        settings: Arc::new(settings),
        uid_seed: random_uid_seed(),
        ..ClusterState::default()
    };
    let routes = Outbox::starting_at(first_route_version());
    let machine = ControllerStateMachine::new(state, routes);
    let shared = Arc::new(ControllerRuntime::new(machine, node.node_spec));
    let files = local_files::LocalFiles::open(&config.state, Arc::clone(&shared))?;
    info!(listen = config.listen, state = %config.state.display(), "controller started");
    let stop = || shutdown.clone();
    // A task of its own: it must write the last objects after `shutdown`, which the `select!` would drop.
    let writing = tokio::spawn(local_files::write_objects_until_shutdown(
        Arc::clone(&shared),
        config.state.clone(),
        stop(),
    ));
    let done = tokio::select! {
        served = grpc_services::serve(Arc::clone(&shared), &config.listen, stop()) => served.map_err(ControllerError::from),
        watched = files.watch_manifests(stop()) => watched.map_err(ControllerError::from),
        served = pages::serve(config.admin, admin::admin_state(&shared), axum::Router::new(), stop()) => {
            served.map_err(ControllerError::from)
        }
        () = run_until_shutdown(local_node::forward_pod_statuses(Arc::clone(&shared), node.statuses, stop()), &shutdown) => Ok(()),
        () = shared.run_timers(stop()) => Ok(()),
    };
    shutdown.cancel();
    // It fails only after a panic, which was logged.
    let _ = writing.await;
    info!("controller stopped");
    done
}

/// Runs `work`, then waits for `shutdown`, so that the end of `work` ends nothing else.
async fn run_until_shutdown(work: impl Future<Output = ()>, shutdown: &CancellationToken) {
    work.await;
    shutdown.cancelled().await;
}

/// Hands over Revisions whose images may have other digests, until the sender ends.
async fn receive_digests(
    runtime: &ControllerRuntime,
    mut changed: tokio::sync::mpsc::Receiver<common::wire::NamespacedName>,
) {
    while let Some(revision) = changed.recv().await {
        runtime.resolve_digests(&revision);
    }
}

/// Runs one replica of the controller on Kubernetes until `shutdown`.
pub async fn run_on_kubernetes(
    config: ControllerConfig,
    cluster: config::KubernetesConfig,
    shutdown: CancellationToken,
) -> Result<(), ControllerError> {
    config.validate()?;
    cluster.validate()?;
    let shutdown = shutdown.child_token();
    let _ended = shutdown.clone().drop_guard();
    let shared = Arc::new(loading_runtime(&config, &cluster));
    let (runtime, reads_secrets) = (Arc::clone(&shared), config.serves_tls());
    let platform = platform::KubernetesPlatform::new(&cluster, runtime, reads_secrets).await?;
    let identities = certificate_services(&config, &cluster, &platform)?;
    let stop = || shutdown.clone();
    info!(listen = config.listen, pod = cluster.pod, "controller started");
    // Small, since the receiver only steps the machine.
    let (resolved_tx, resolved_rx) = tokio::sync::mpsc::channel(64);
    let secrets = api::pull_secrets::ClusterPullSecrets::new(platform.client().clone());
    let resolver = DigestResolver::new(secrets, registry::RegistryClient::default(), resolved_tx);
    shared.set_digest_resolver(Arc::clone(&resolver));
    let resolving = receive_digests(&shared, resolved_rx);
    let synced = platform.synced();
    let serving = async {
        // A table that lacks objects which are not listed yet would take routes away.
        synced.wait().await;
        let issuer = identities.as_ref().map(|(_, issuer)| issuer);
        grpc_services::serve_with_issuer(Arc::clone(&shared), &config.listen, issuer, stop()).await
    };
    // Only the leader renews authorities, or two replicas would issue different ones.
    let renewing = async {
        if let Some((authority_manager, _)) = &identities {
            authority_manager.run(|| platform.may_write(), stop()).await;
        }
    };
    let signing = async {
        if let Some(signer) = local_signer(&config, &cluster, &platform, &shared) {
            signer.run(|| platform.may_write(), stop()).await;
        }
    };
    let admin = platform.extend_admin(admin::admin_state(&shared));
    let mut running = std::pin::pin!(platform.run(stop()));
    let mut has_ended = false;
    let done = tokio::select! {
        served = serving => served.map_err(ControllerError::from),
        served = pages::serve(config.admin, admin, axum::Router::new(), stop()) => {
            served.map_err(ControllerError::from)
        }
        () = shared.run_timers(stop()) => Ok(()),
        () = running.as_mut() => {
            has_ended = true;
            Ok(())
        }
        () = resolver.run(stop()) => Ok(()),
        () = resolving => Ok(()),
        () = run_until_shutdown(renewing, &shutdown) => Ok(()),
        () = run_until_shutdown(signing, &shutdown) => Ok(()),
    };
    shutdown.cancel();
    if !has_ended {
        // The webhook serves a moment longer.
        running.await;
    }
    // Until the Lease is released: otherwise the next leader would have to wait for its expiry.
    platform.wait_for_release().await;
    info!("controller stopped");
    done
}

/// Returns a runtime that plans nothing before the API server's objects are known.
fn loading_runtime(
    config: &ControllerConfig,
    cluster: &config::KubernetesConfig,
) -> ControllerRuntime {
    let settings = ControllerSettings {
        platform: PlatformKind::Kubernetes,
        cluster_domain: cluster.cluster_domain.clone(),
        signs_local_certificates: config.serves_tls(),
        system_namespace: cluster.system_namespace.clone(),
        own_pod_name: cluster.pod.clone(),
        fixed_activators: Vec::new(),
        opened_gateway_ports: None,
        ..config.to_settings(String::new())
    };
    // The holder of the Lease is the leader; no replica is one before it holds the Lease.
    let is_leader = false;
    let state = ClusterState {
        settings: Arc::new(settings),
        uid_seed: random_uid_seed(),
        is_leader,
        ..ClusterState::default()
    };
    let routes = Outbox::starting_at(first_route_version());
    // The receiver is dropped: on Kubernetes, pods are created through the API server.
    let node_spec = tokio::sync::watch::channel(common::local_node::LocalNodeSpec::default()).0;
    ControllerRuntime::new(ControllerStateMachine::new(state, routes).loading(), node_spec)
}

/// Manager of the certificate authorities, and issuer of certificates.
type CertificateServices = (Arc<AuthorityManager>, Arc<CertificateIssuer>);

/// Returns manager and issuer if streams are served over TLS.
fn certificate_services(
    config: &ControllerConfig,
    cluster: &config::KubernetesConfig,
    platform: &platform::KubernetesPlatform,
) -> Result<Option<CertificateServices>, ControllerError> {
    if !config.serves_tls() {
        return Ok(None);
    }
    // Clients check the role alone. The pod's name, which is unique among living pods, distinguishes the replicas.
    let identity =
        CertificateIdentity::new(Component::Controller, &config.node, &cluster.pod, &cluster.pod)?;
    let authority_store = IdentityApiClient::new(platform.client(), &cluster.system_namespace);
    let authority_store = Arc::new(authority_store);
    let authority_manager =
        AuthorityManager::new(Arc::<IdentityApiClient>::clone(&authority_store), identity);
    let issuer = CertificateIssuer::new(
        Arc::clone(&authority_manager),
        authority_store,
        &cluster.system_namespace,
    );
    Ok(Some((authority_manager, issuer)))
}

/// Returns the signer of certificates for names inside the cluster; `None`: their keys could be sent without TLS only.
fn local_signer(
    config: &ControllerConfig,
    cluster: &config::KubernetesConfig,
    platform: &platform::KubernetesPlatform,
    shared: &Arc<ControllerRuntime>,
) -> Option<LocalCertificateSigner> {
    config.serves_tls().then(|| {
        let store =
            IdentityApiClient::for_local_names(platform.client(), &cluster.system_namespace);
        LocalCertificateSigner::new(Arc::new(store), Arc::clone(shared), &cluster.cluster_domain)
    })
}

/// Returns the ID of this boot of the machine. It is empty if the kernel gives none; then a reboot goes
/// unnoticed, and pods from before it are restored too.
fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Returns the version of the first table: microseconds since 1970. It tells the tables of different starts apart in
/// logs and metrics, but a clock that is set back may repeat versions. Versions are comparable within one stream only,
/// and nothing compares those of different streams.
fn first_route_version() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(now.unwrap_or_default().as_micros()).unwrap_or(1).max(1)
}

/// Returns a random number that distinguishes this start of the controller from all others.
fn random_uid_seed() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    cluster_state::Uid::parse(text.trim()).unwrap_or_default().0
}
