//! The autoscaler: usage → requested scale and path, by Knative's KPA.
//!
//! ```text
//! agents, activators ──UsageReport──▶ usage_service ─▶ usage ─▶ window ─▶ scaler ─▶ scale_to_zero ─┐
//! controller ──RouteTable──▶ evaluator ── policies, pods ────────────────────┴────────────┘        │
//! controller ◀──ScaleDecision──────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! | module | | what |
//! |---|---|---|
//! | [`window`] | pure | load by the second → stable and panic averages |
//! | [`usage`] | pure | running totals from many senders → load by the second |
//! | [`scaler`] | pure | averages → desired scale, panic mode, burst capacity |
//! | [`scale_to_zero`] | pure | desired scale → requested scale: bounds, `Active` condition, scale to zero |
//! | [`revision`] | pure | one Revision: the four above, and when to evaluate |
//! | [`revisions`] | pure | all Revisions: senders, routes, due evaluations |
//! | [`heartbeat`] | pure | heartbeats, by which controllers choose the active autoscaler |
//! | [`usage_service`] | shell | the Usage service |
//! | [`evaluator`] | shell | routes in, decisions out |
//!
//! Nothing runs for a Revision that is asleep: it has no timer. The task that receives a report of such a Revision also
//! decides on it. The autoscaler never talks to Kubernetes; when it fails, the last decisions stay in force.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use common::{
    admin::AdminError,
    component::Component,
    enrollment,
    link::{ComponentLink, LinkError, ReplicaResolver, TlsAdmission},
    tls::{TlsCredentials, accept::AcceptLimits},
    wire::{ClientComponent, ComponentReplica, ServerComponent},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

pub mod admin;
pub mod config;
pub mod evaluator;
pub mod heartbeat;
pub mod revision;
pub mod revisions;
pub mod scale_to_zero;
pub mod scaler;
pub mod usage;
pub mod usage_service;
pub mod window;

pub use config::AutoscalerConfig;

/// Error that ends the autoscaler.
#[derive(Debug, thiserror::Error)]
pub enum AutoscalerError {
    /// A setting is outside its permitted range.
    #[error("bad configuration")]
    Config(#[from] config::AutoscalerConfigError),
    /// The Usage service could not listen or serve.
    #[error("cannot receive usage")]
    Usage(#[from] LinkError),
    /// The admin port could not listen or serve.
    #[error("cannot serve admin endpoints")]
    Admin(#[from] AdminError),
}

/// Runs the autoscaler until `shutdown` is cancelled or a server fails.
pub async fn run(
    config: AutoscalerConfig,
    shutdown: CancellationToken,
) -> Result<(), AutoscalerError> {
    config.validate()?;
    info!(?config, "autoscaler starts");
    let local_replica = ComponentReplica {
        role: ClientComponent::Autoscaler,
        name: config.name.clone(),
        node: String::new(),
    };
    let credentials = config.identity.as_ref().map(|_| TlsCredentials::new());
    let controllers = ReplicaResolver::with_credentials(
        Component::Controller,
        &config.controller,
        credentials.as_ref(),
    );
    let enrollment = maintain_certificate(&config, credentials.as_ref(), &controllers, &shutdown);
    // No client without a certificate: agents and activators get theirs from the controller before they report.
    let tls_admission = credentials.map(|credentials| TlsAdmission {
        credentials,
        allows_anonymous: false,
        limits: AcceptLimits::default(),
        known_addresses: None,
    });
    let link = || {
        ComponentLink::with_resolver(
            Arc::clone(&controllers),
            local_replica.clone(),
            shutdown.clone(),
        )
    };
    let routes = Arc::new(
        link().with_listed_replicas(ServerComponent::Controller, Arc::clone(&controllers)),
    );
    let decisions = link();
    let evaluator = Arc::new(evaluator::ScaleEvaluator::new(config.tick(), unix_time_ms()));
    let admin = admin::admin_pages(Arc::clone(&evaluator), Arc::clone(&routes));
    let usage = usage_service::serve(
        &config.usage,
        Arc::clone(&evaluator),
        tls_admission.as_ref(),
        shutdown.clone(),
    );
    let usage = async { Ok(usage.await?) };
    let pages = common::admin::serve(config.admin, admin, axum::Router::new(), shutdown.clone());
    let pages = async { Ok::<(), AutoscalerError>(pages.await?) };
    // The route stream and the decision stream are separate links, so a slow controller delays neither by the other.
    let streams = async {
        let (outbox, heartbeats) = (evaluator.outbox(), evaluator.subscribe_heartbeats());
        tokio::join!(
            evaluator::apply_route_batches(&routes, &evaluator),
            decisions.send_decisions(outbox, &heartbeats),
            evaluator.run_timer(&shutdown),
            evaluator.send_heartbeats(&shutdown),
            enrollment,
        );
        Ok(())
    };
    // The streams end only at `shutdown`; a server that fails ends all of them at once.
    tokio::try_join!(usage, pages, streams)?;
    info!("autoscaler stopped");
    Ok(())
}

/// Keeps the certificate fresh until `shutdown`, if the configuration names an identity folder.
fn maintain_certificate(
    config: &AutoscalerConfig,
    credentials: Option<&Arc<TlsCredentials>>,
    controllers: &Arc<ReplicaResolver>,
    shutdown: &CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let files = config.identity.as_deref().map(enrollment::EnrollmentFiles::in_folder);
    let identity = credentials.cloned().zip(files);
    let (controllers, shutdown) = (Arc::clone(controllers), shutdown.clone());
    async move {
        match identity {
            Some((identity, files)) => {
                enrollment::keep_enrolled(identity, controllers, files, shutdown).await
            }
            None => shutdown.cancelled().await,
        }
    }
}

/// Current time in milliseconds since 1970. Controllers of earlier releases order autoscaler replicas by it.
fn unix_time_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
