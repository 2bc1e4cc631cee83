//! The autoscaler: usage → wanted pods and path, by Knative's KPA.
//!
//! ```text
//! agents, activators ──UsageReport──▶ agents ─▶ usage ─▶ window ─▶ decide ─▶ zero ─▶ controller ──ScaleDecision──▶
//! controller ──RouteTable──▶ controller ─────────────────────────────┘ policies, pods
//! ```
//!
//! | module | | what |
//! |---|---|---|
//! | [`window`] | pure | load by the second → stable and panic averages |
//! | [`usage`] | pure | running totals from many senders → load by the second |
//! | [`decide`] | pure | averages → wished pods, panic, burst capacity |
//! | [`zero`] | pure | bounds, `Active` condition, the way to zero |
//! | [`revision`] | pure | one revision: the four above, and when to evaluate |
//! | [`fleet`] | pure | all revisions: senders, routes, who is due |
//! | [`heart`] | pure | what it says of itself, so that controllers know whose decisions count |
//! | [`agents`] | shell | the Usage service |
//! | [`controller`] | shell | routes in, decisions out |
//!
//! Nothing runs for a sleeping revision: it has no timer, and news of it is decided in the task that receives
//! it. It never talks to Kubernetes; losing it leaves the last decisions in force.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use common::{
    admin::AdminError,
    link::{Door, Finder, Link, LinkError},
    tls::{Credentials, accept::Bounds, enrol, peer::Holder},
    wire::{Part, Role, Subscriber},
};
use tokio_util::sync::CancellationToken;
use tracing::info;

pub mod admin;
pub mod agents;
pub mod config;
pub mod controller;
pub mod decide;
pub mod fleet;
pub mod heart;
pub mod revision;
pub mod usage;
pub mod window;
pub mod zero;

pub use config::Config;

/// Why the autoscaler could not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is out of range.
    #[error("bad configuration")]
    Config(#[from] config::BadConfig),
    /// The Usage service failed.
    #[error("cannot receive usage")]
    Usage(#[from] LinkError),
    /// The admin port failed.
    #[error("cannot serve admin endpoints")]
    Admin(#[from] AdminError),
}

/// Runs the autoscaler until `shutdown`.
pub async fn run(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    config.validate()?;
    info!(?config, "autoscaler starts");
    let who = Subscriber { role: Role::Autoscaler, name: config.name.clone(), node: String::new() };
    let credentials = config.identity.as_ref().map(|_| Credentials::new());
    let controllers =
        Finder::known_as(Holder::Controller, &config.controller, credentials.as_ref());
    let enrolled = enrolled(&config, credentials.as_ref(), &controllers, &shutdown);
    // Whoever reports has a certificate: it had to ask the controller first.
    let door =
        credentials.map(|credentials| Door { credentials, open: false, bounds: Bounds::default() });
    let link = || Link::to(Arc::clone(&controllers), who.clone(), shutdown.clone());
    let routes = Arc::new(link().tells(Part::Controller, Arc::clone(&controllers)));
    let decisions = link();
    let brain = Arc::new(controller::Brain::new(config.tick(), now_ms()));
    let admin = admin::admin(Arc::clone(&brain), Arc::clone(&routes));
    let usage = agents::serve(&config.usage, Arc::clone(&brain), door.as_ref(), shutdown.clone());
    let usage = async { Ok(usage.await?) };
    let pages = common::admin::serve(config.admin, admin, axum::Router::new(), shutdown.clone());
    let pages = async { Ok::<(), Error>(pages.await?) };
    let streams = async {
        let (outbox, alive) = (brain.outbox(), brain.alive());
        tokio::join!(
            controller::follow(&routes, &brain),
            decisions.decide(outbox, &alive),
            brain.keep_time(&shutdown),
            brain.beat(&shutdown),
            enrolled,
        );
        Ok(())
    };
    tokio::try_join!(usage, pages, streams)?;
    info!("autoscaler stopped");
    Ok(())
}

/// Keeps the certificate fresh, where there is to be one, until `shutdown`.
fn enrolled(
    config: &Config,
    credentials: Option<&Arc<Credentials>>,
    controllers: &Arc<Finder>,
    shutdown: &CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let files = config.identity.as_deref().map(enrol::Files::below);
    let own = credentials.cloned().zip(files);
    let (controllers, shutdown) = (Arc::clone(controllers), shutdown.clone());
    async move {
        match own {
            Some((own, files)) => enrol::keep(own, controllers, files, shutdown).await,
            None => shutdown.cancelled().await,
        }
    }
}

/// Milliseconds since 1970: by these, controllers of earlier releases tell replicas apart.
fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
