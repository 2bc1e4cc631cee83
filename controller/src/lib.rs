//! Controller: Knative objects → pods, statuses and routes.
//!
//! Reading order: [`world`] (observed state), [`plan`] (desired state), [`machine`] (one event at a time), then the
//! shells around them.
//!
//! | module | content |
//! |---|---|
//! | [`knative`] | the objects as users see them |
//! | [`parse`], [`policy`] | manifest → checked facts, or every broken rule; admission |
//! | [`crds`] | the types as CustomResourceDefinitions |
//! | [`config_maps`] | the `config-*` ConfigMaps as settings, followed live |
//! | [`digests`] | tags of images → digests, in the background |
//! | [`domains`], [`rollout`], [`retention`] | host names of Routes, gradual rollouts, old Revisions |
//! | [`world`] | everything observed at one moment |
//! | [`plan`] | world → objects, pods, routes, timers |
//! | [`machine`] | event → plan of the affected app → effects |
//! | [`render`], [`restore`] | facts → objects, and back after a restart |
//! | [`children`] | facts → child objects as Kubernetes holds them |
//! | [`shared`] | the machine behind a lock, with a clock |
//! | [`agents`] | streams: routes out, reports and decisions in |
//! | [`webhook`] | admission webhook of the API server |
//! | [`bind`] | node to which a pod may be bound at its creation |
//! | [`kube`] | Kubernetes: watches, writes, leader election |
//! | [`identity`] | identities of components: tokens in, certificates out |
//! | [`followers`], [`deciders`] | drain acknowledgements; election of the active autoscaler |
//! | [`files`], [`local`] | the local platform: folders and the local node |
#![forbid(unsafe_code)]

use std::sync::Arc;

use common::{
    admin as pages,
    link::LinkError,
    outbox::Outbox,
    tls::peer::{CertificateIdentity, CertificateIdentityError, CertificateRole},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

pub mod admin;
pub mod agents;
pub mod bind;
pub mod children;
pub mod config;
pub mod config_maps;
pub mod crds;
pub mod deciders;
pub mod digests;
pub mod domains;
pub mod files;
pub mod followers;
pub mod identity;
pub mod knative;
pub mod kube;
pub mod local;
pub mod machine;
pub mod network_policies;
pub mod observe;
pub mod parse;
pub mod plan;
pub mod policy;
pub mod render;
pub mod restore;
pub mod retention;
pub mod rollout;
pub mod shared;
pub mod want;
pub mod webhook;
pub mod world;

pub use config::ControllerConfig;
use digests::{registry::RegistryClient, resolver::DigestResolver};
use identity::{CertificateIssuer, keep::AuthorityManager};
use machine::ControllerStateMachine;
use shared::ControllerRuntime;
use world::{ClusterState, ControllerSettings, PlatformKind};

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
    Files(#[from] files::LocalFilesError),
    /// The API server cannot be used.
    #[error("cannot use Kubernetes")]
    Kubernetes(#[from] kube::client::KubeClientError),
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
    node: local::LocalNodeChannels,
    shutdown: CancellationToken,
) -> Result<(), ControllerError> {
    config.validate()?;
    // The end of this function, for any reason, also ends the tasks it started.
    let shutdown = shutdown.child_token();
    let _ended = shutdown.clone().drop_guard();
    let settings = config.settings(boot_id(), policy::ScalePolicyConfig::default());
    let world =
        ClusterState { settings: Arc::new(settings), seed: seed(), ..ClusterState::default() };
    let routes = Outbox::starting_at(first_version());
    let shared =
        Arc::new(ControllerRuntime::new(ControllerStateMachine::new(world, routes), node.orders));
    let files = files::LocalFiles::open(&config.state, Arc::clone(&shared))?;
    info!(listen = config.listen, state = %config.state.display(), "controller started");
    let keep = Arc::clone(&shared);
    let stop = || shutdown.clone();
    // A task of its own: it must write the last objects after `shutdown`, which the `select!` would drop.
    let writing =
        tokio::spawn(files::keep_writing(Arc::clone(&shared), config.state.clone(), stop()));
    let done = tokio::select! {
        served = agents::serve(Arc::clone(&shared), &config.listen, stop()) => served.map_err(ControllerError::from),
        watched = files.watch(stop()) => watched.map_err(ControllerError::from),
        served = pages::serve(config.admin, admin::admin(&shared), axum::Router::new(), stop()) => {
            served.map_err(ControllerError::from)
        }
        () = forever(local::follow(Arc::clone(&shared), node.statuses, stop()), &shutdown) => Ok(()),
        () = keep.keep_time(stop()) => Ok(()),
    };
    shutdown.cancel();
    // It fails only after a panic, which was logged.
    let _ = writing.await;
    info!("controller stopped");
    done
}

/// Runs `work`, then waits for `shutdown`, so that the end of `work` ends nothing else.
async fn forever(work: impl Future<Output = ()>, shutdown: &CancellationToken) {
    work.await;
    shutdown.cancelled().await;
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
    let platform = kube::run::KubernetesPlatform::new(&cluster, Arc::clone(&shared)).await?;
    let identities = identities(&config, &cluster, &platform)?;
    let stop = || shutdown.clone();
    info!(listen = config.listen, pod = cluster.pod, "controller started");
    // Small, since the receiver only steps the machine.
    let (changed, mut resolved) = tokio::sync::mpsc::channel(64);
    let secrets = kube::secrets::ClusterPullSecrets::new(platform.client().clone());
    let resolver = DigestResolver::new(secrets, RegistryClient::default(), changed);
    shared.resolve_with(Arc::clone(&resolver));
    let resolving = async {
        while let Some(revision) = resolved.recv().await {
            shared.resolve(&revision);
        }
    };
    let synced = platform.synced();
    let serving = async {
        // A table that lacks objects which are not listed yet would take routes away.
        synced.cancelled().await;
        let issuer = identities.as_ref().map(|(_, issuer)| issuer);
        agents::serve_to(Arc::clone(&shared), &config.listen, issuer, stop()).await
    };
    // Only the leader renews authorities, or two replicas would issue different ones.
    let keeping = async {
        if let Some((keeper, _)) = &identities {
            keeper.keep(|| platform.may_write(), stop()).await;
        }
        shutdown.cancelled().await;
    };
    let admin = platform.admin(admin::admin(&shared));
    let done = tokio::select! {
        served = serving => served.map_err(ControllerError::from),
        served = pages::serve(config.admin, admin, axum::Router::new(), stop()) => {
            served.map_err(ControllerError::from)
        }
        () = shared.keep_time(stop()) => Ok(()),
        () = platform.run(stop()) => Ok(()),
        () = resolver.run(stop()) => Ok(()),
        () = resolving => Ok(()),
        () = keeping => Ok(()),
    };
    shutdown.cancel();
    // Until the Lease is released: otherwise the next leader would have to wait for its expiry.
    platform.ended().await;
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
        namespace: cluster.system_namespace.clone(),
        pod: cluster.pod.clone(),
        activators: Vec::new(),
        ..config.settings(String::new(), policy::ScalePolicyConfig::default())
    };
    // The holder of the Lease is the leader; no replica is one before it holds the Lease.
    let leads = false;
    let world = ClusterState {
        settings: Arc::new(settings),
        seed: seed(),
        leads,
        ..ClusterState::default()
    };
    let routes = Outbox::starting_at(first_version());
    // The receiver is dropped: on Kubernetes, pods are created through the API server.
    let orders = tokio::sync::watch::channel(common::node::LocalNodeSpec::default()).0;
    ControllerRuntime::new(ControllerStateMachine::new(world, routes).loading(), orders)
}

/// Keeper of the certificate authorities, and issuer of certificates.
type CertificateServices = (Arc<AuthorityManager>, Arc<CertificateIssuer>);

/// Returns keeper and issuer if streams are served over TLS.
fn identities(
    config: &ControllerConfig,
    cluster: &config::KubernetesConfig,
    platform: &kube::run::KubernetesPlatform,
) -> Result<Option<CertificateServices>, ControllerError> {
    if !config.listen.starts_with("https://") {
        return Ok(None);
    }
    // Clients check the role alone. The pod's name, which is unique among living pods, distinguishes the replicas.
    let own = CertificateIdentity::new(
        CertificateRole::Controller,
        &config.node,
        &cluster.pod,
        &cluster.pod,
    )?;
    let kept = identity::kube::IdentityApiClient::new(platform.client(), &cluster.system_namespace);
    let kept = Arc::new(kept);
    let keeper = AuthorityManager::new(Arc::<identity::kube::IdentityApiClient>::clone(&kept), own);
    let issuer = CertificateIssuer::new(Arc::clone(&keeper), kept, &cluster.system_namespace);
    Ok(Some((keeper, issuer)))
}

/// Returns the ID of this boot of the machine. It is empty if the kernel gives none; then a reboot goes
/// unnoticed, and pods from before it are restored too.
fn boot_id() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Returns a table version above all versions of earlier starts: microseconds since 1970. Otherwise a report about an
/// earlier table could be taken for one about the present table.
fn first_version() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(now.unwrap_or_default().as_micros()).unwrap_or(1).max(1)
}

/// Returns a random number that distinguishes this start of the controller from all others.
fn seed() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap_or_default();
    world::Uid::parse(text.trim()).unwrap_or_default().0
}
