//! The node's agent: finds the pods of this node, tells the kernel of them, and reports what they do.
//!
//! | module | what |
//! |---|---|
//! | [`probe`], [`pods`] | pure: whether a pod is ready; what follows from what is known of it |
//! | [`plan`] | pure: from the RouteTable to ordered writes of the kernel's maps |
//! | [`maps`], [`sys`] | the kernel's maps and the agent's own system calls |
//! | `pods/find`, `pods/namespace`, `pods/ask`, `pods/mark` | cgroups, namespaces, probes and how the kernel knows them |
//! | [`sockdiag`] | the TCP sockets of a namespace, listed and ended |
//! | `kept` | pure: which kept connections to end; `kept/end` ends them |
//! | `agent` | the loop that joins them |
//! | `controller`, `autoscaler`, `admin` | the streams, health and metrics |

mod admin;
mod agent;
mod autoscaler;
mod clock;
pub mod config;
mod controller;
mod kept;
mod kernel;
pub mod maps;
mod netlink;
pub mod plan;
pub mod pods;
pub mod probe;
pub mod programs;
mod slots;
pub mod sockdiag;
pub mod sys;

use std::{io, sync::Arc};

use common::{
    admin as pages,
    link::{Finder, Link},
    outbox::Outbox,
    wire::{Part, Role, Subscriber},
};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use crate::{
    admin::{Metrics, Troubles},
    agent::{Agent, Ends},
    config::Config,
    controller::Routes,
    pods::mark::Marks,
    programs::Places,
};

/// Events of the finder that may wait to be taken in.
const FOUND: usize = 1_024;

/// Why an agent stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting makes no sense.
    #[error(transparent)]
    Config(#[from] config::Invalid),
    /// The kernel half cannot be brought into force.
    #[error(transparent)]
    Programs(#[from] programs::Error),
    /// A map cannot be used.
    #[error(transparent)]
    Maps(#[from] maps::Error),
    /// The kernel's events cannot be waited for.
    #[error("cannot wait for the kernel's events")]
    Events(#[source] io::Error),
    /// Pods cannot be looked for.
    #[error("cannot start looking for pods")]
    Find(#[source] io::Error),
    /// The admin pages cannot be served.
    #[error(transparent)]
    Admin(#[from] pages::AdminError),
}

/// Runs the agent until `shutdown`. What it wrote into the kernel stays in force.
pub async fn run(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    config.validate()?;
    info!(?config, "agent starts");
    let places = Places {
        bpffs: config.pins.clone(),
        clients: config.clients_cgroup.clone(),
        pods: config.pods_cgroup.clone(),
    };
    let pins = places.pins();
    let (kernel, maps, events) = tokio::select! {
        started = kernel::start(places, config.activator_netns.clone()) => started?,
        () = shutdown.cancelled() => return Ok(()),
    };
    let events = sys::readable(events).map_err(Error::Events)?;

    let tasks = TaskTracker::new();
    let (metrics, registry) = Metrics::new();
    let troubles = Troubles::default();
    tasks.spawn(kernel.watch(troubles.clone(), shutdown.clone()));
    let who =
        Subscriber { role: Role::Agent, name: config.node.clone(), node: config.node.clone() };
    let controllers = Finder::of(&config.controller);
    let autoscalers = Finder::of(&config.autoscaler);
    let link = |to: &Arc<Finder>| Link::to(Arc::clone(to), who.clone(), shutdown.clone());

    let routes = Arc::new(Routes::default());
    let routes_link = link(&controllers)
        .tells(Part::Controller, Arc::clone(&controllers))
        .tells(Part::Autoscaler, Arc::clone(&autoscalers));
    let following = Arc::clone(&routes);
    tasks.spawn(async move { following.follow(&routes_link).await });
    let (reports, settled) = (Outbox::new(), CancellationToken::new());
    tasks.spawn(controller::report(
        Arc::new(link(&controllers)),
        reports.clone(),
        settled.clone(),
        shutdown.clone(),
    ));
    let usage = autoscaler::Usage::default();
    let (totals, usage_link) = (usage.outbox(), link(&autoscalers));
    tasks.spawn(async move { usage_link.report_usage(&totals).await });

    let (found, finds) = mpsc::channel(FOUND);
    let places = pods::find::Places {
        cgroups: config.pods_cgroup.clone(),
        namespaces: config.namespaces.clone(),
    };
    let finder = pods::find::start(places, found).map_err(Error::Find)?;
    let marks = Marks::open(&pins)?;
    let ends =
        Ends { maps, marks, finder, reports, usage, settled, metrics, troubles: troubles.clone() };
    let agent = Agent::new(config.node.clone(), config.clients_cgroup.clone(), ends)?;
    let pages = pages::serve(
        config.admin,
        admin::pages(registry, troubles),
        axum::Router::new(),
        shutdown.clone(),
    );
    let ended = tokio::select! {
        ended = agent.run(events, &routes, finds, &shutdown) => ended.map_err(Error::Events),
        ended = pages => ended.map_err(Error::Admin),
    };
    shutdown.cancel();
    tasks.close();
    tasks.wait().await;
    ended
}
