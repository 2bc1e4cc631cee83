//! Agent of one node: finds the node's pods, writes the RouteTable into the kernel's maps, and reports the pods' state.
//!
//! Modules by layer, lowest first. A module imports modules of its own layer and of lower ones.
//!
//! | layer | subject |
//! |---|---|
//! | [`config`], [`paths`], [`incompatible`], [`pod_gauge`], `capabilities`, `metrics`, `clock`, `lock` | base of all |
//! | [`net`] | sockets, addresses and rules of a network namespace, and connects to pods of other nodes |
//! | [`kernel`] | the eBPF programs, their maps, and the agent's own system calls |
//! | [`routes`] | the RouteTable on this node: its stream, and the plans that put it in force |
//! | `usage` | requests that pods have served: reports to the autoscaler, and totals of Revisions |
//! | [`pods`] | the pods of this node: search, registration, readiness and end |
//! | `connections` | scans of connections: stale ones, overdue requests, drift of gauges |
//! | [`node_check`] | checks of the node for `rouse check` |
//! | `admin` | health and metrics pages |
//! | `agent` | the loop that joins them |

mod admin;
mod agent;
mod capabilities;
mod clock;
pub mod config;
mod connections;
pub mod incompatible;
pub mod kernel;
mod lock;
mod metrics;
pub mod net;
pub mod node_check;
pub mod paths;
pub mod pod_gauge;
pub mod pods;
pub mod routes;
mod usage;

pub use capabilities::CAPABILITIES;

use std::{io, sync::Arc};

use common::{
    admin as pages,
    component::Component,
    enrollment,
    link::{ComponentLink, PodReportKey, ReplicaResolver},
    once_signal::OnceSignal,
    outbox::Outbox,
    tls::TlsCredentials,
    wire::{ClientComponent, ComponentReplica, PodReportItem, ServerComponent},
};
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use crate::{
    agent::{Agent, AgentHandles},
    config::AgentConfig,
    connections::stale_connections::close::StaleConnectionCloser,
    kernel::{
        netns_cookies::NetnsCookies, program_supervisor, takeover_stage::ProgramTakeoverStage,
    },
    metrics::NotReadyReasons,
    paths::AgentPaths,
    pods::{
        finder::{self, PodServerDeps},
        finder_queue::FinderQueue,
        pod_server::prestop::PreStopHooks,
        probe_marks::ProbeMarks,
        types::PodTrackerEvent,
    },
    routes::{
        cluster_watch::{self, ClusterConnection, ClusterInbox},
        event_writer::ServiceEvents,
        range_routes,
        route_stream::{self, RouteBatchInbox},
    },
    usage::{
        revision_totals_store::{RevisionTotalsStore, SharedRevisionTotals},
        usage_reporter::PodUsageReporter,
    },
};

/// Capacity of the channel of the finder's events.
const FINDER_EVENTS_MAX: usize = 1_024;

/// Reason for which an agent stopped.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] config::AgentConfigError),
    /// The eBPF programs cannot be loaded or attached.
    #[error(transparent)]
    Programs(#[from] kernel::programs::EbpfProgramsError),
    /// A kernel map cannot be opened, read or written.
    #[error(transparent)]
    Maps(#[from] kernel::maps::KernelMapError),
    /// The ring of kernel events cannot be polled.
    #[error("cannot wait for the kernel's events")]
    Events(#[source] io::Error),
    /// The search for pods cannot start.
    #[error("cannot start the search for pods")]
    PodFinder(#[source] io::Error),
    /// The cluster's Services cannot be watched.
    #[error(transparent)]
    ClusterWatch(#[from] routes::cluster_watch::ClusterWatchError),
    /// The admin pages cannot be served.
    #[error(transparent)]
    Admin(#[from] pages::AdminError),
}

/// Makes the replica resolvers of controller and autoscaler, and renews the certificate if an identity is configured.
fn replica_resolvers(
    config: &AgentConfig,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> (Arc<ReplicaResolver>, Arc<ReplicaResolver>) {
    let credentials = config.identity.as_ref().map(|_| TlsCredentials::new());
    let resolver = |component, setting| {
        ReplicaResolver::with_credentials(component, setting, credentials.as_ref())
    };
    let controllers = resolver(Component::Controller, &config.controller);
    let autoscalers = resolver(Component::Autoscaler, &config.autoscaler);
    if let (Some(credentials), Some(folder)) = (&credentials, &config.identity) {
        let (own_credentials, resolver) = (Arc::clone(credentials), Arc::clone(&controllers));
        tasks.spawn(enrollment::keep_enrolled(
            own_credentials,
            resolver,
            enrollment::EnrollmentFiles::in_folder(folder),
            shutdown.clone(),
        ));
    }
    (controllers, autoscalers)
}

/// Returns a token that is cancelled after `shutdown`, but not before each waiting kubelet has its response. A preStop
/// request that breaks off would let the kubelet stop the pod at once, even with requests in flight.
fn shutdown_after_prestop(
    shutdown: CancellationToken,
    prestop_hooks: PreStopHooks,
) -> CancellationToken {
    let end = CancellationToken::new();
    let ended = end.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            // The agent has ended for another reason.
            () = ended.cancelled() => return,
        }
        info!("agent ends once no preStop request waits");
        prestop_hooks.wait_until_none_open().await;
        ended.cancel();
    });
    end
}

/// Streams to the controllers and the autoscalers.
struct AgentStreams {
    routes: Arc<RouteBatchInbox>,
    reports: Outbox<PodReportKey, PodReportItem>,
    reports_ready: OnceSignal,
    usage: PodUsageReporter,
}

impl AgentStreams {
    /// Opens the streams and keeps them open until `shutdown`.
    fn open(config: &AgentConfig, tasks: &TaskTracker, shutdown: &CancellationToken) -> Self {
        let (controllers, autoscalers) = replica_resolvers(config, tasks, shutdown);
        let link = |to: &Arc<ReplicaResolver>| {
            ComponentLink::with_resolver(Arc::clone(to), own_subscriber(config), shutdown.clone())
        };
        let routes = Arc::new(RouteBatchInbox::default());
        let routes_link = link(&controllers)
            .with_listed_replicas(ServerComponent::Controller, Arc::clone(&controllers))
            .with_listed_replicas(ServerComponent::Autoscaler, Arc::clone(&autoscalers));
        let inbox = Arc::clone(&routes);
        tasks.spawn(async move { inbox.receive_batches(Arc::new(routes_link)).await });
        let (reports, reports_ready) = (Outbox::new(), OnceSignal::new());
        tasks.spawn(route_stream::report_pods(
            Arc::new(link(&controllers)),
            reports.clone(),
            reports_ready.clone(),
            shutdown.clone(),
        ));
        let usage = PodUsageReporter::default();
        let (totals, usage_link) = (usage.outbox(), link(&autoscalers));
        tasks.spawn(async move { usage_link.report_usage(&totals).await });
        Self { routes, reports, reports_ready, usage }
    }
}

/// Runs the agent until `shutdown`. Its programs and map entries stay in force afterwards.
pub async fn run(config: AgentConfig, shutdown: CancellationToken) -> Result<(), AgentError> {
    config.validate()?;
    info!(?config, "agent starts");
    let prestop_hooks = PreStopHooks::default();
    let shutdown = shutdown_after_prestop(shutdown, prestop_hooks.clone());
    let tasks = TaskTracker::new();
    let exported_totals = SharedRevisionTotals::default();
    let (metrics, registry) = admin::metrics_registry(exported_totals.clone());
    let not_ready = NotReadyReasons::default();
    not_ready.set("programs", Some("not in force yet".to_owned()));
    // Served from the first moment, so that `/readyz` gives the reason while the agent still waits.
    let pages = pages::serve(
        config.admin,
        admin::pages(registry, not_ready.clone()),
        node_check::page::router(&config, &not_ready),
        shutdown.clone(),
    );
    let mut pages = std::pin::pin!(pages);
    let (paths, (kernel, maps, events, locked_closer)) = tokio::select! {
        started = program_supervisor::start(&config, &not_ready) => started?,
        ended = &mut pages => return ended.map_err(AgentError::Admin),
        () = shutdown.cancelled() => return Ok(()),
    };
    not_ready.set("programs", None);
    let probe_marks = ProbeMarks::open(&paths.pins())?;
    let events = kernel::sys::register_readable(events).map_err(AgentError::Events)?;

    let (takeover_stage, takeover_stages) = watch::channel(ProgramTakeoverStage::default());
    tasks.spawn(kernel.run(takeover_stages, not_ready.clone(), metrics.clone(), shutdown.clone()));
    // The streams may open before the loop runs: what arrives waits in `routes` and in the channels.
    let AgentStreams { routes, reports, reports_ready, usage } =
        AgentStreams::open(&config, &tasks, &shutdown);
    let (cluster, service_events) =
        start_cluster_tasks(&config, &takeover_stage, &not_ready, &tasks, &shutdown).await?;
    let (finder_events_tx, finder_events) = mpsc::channel(FINDER_EVENTS_MAX);
    let pod_servers = PodServerDeps { prestop_hooks: prestop_hooks.clone(), conns: maps.conns() };
    let finder_commands = start_pod_finder(&config, &paths, pod_servers, finder_events_tx)?;
    let revision_totals = RevisionTotalsStore::resume(&maps, exported_totals);
    let handles = AgentHandles {
        maps,
        probe_marks,
        finder: FinderQueue::new(finder_commands),
        reports,
        usage,
        revision_totals,
        reports_ready,
        service_events,
        metrics,
        not_ready,
        prestop_hooks,
        upgraded_drain_time: config.upgraded_drain_time(),
        takeover_stage,
    };
    let closer = StaleConnectionCloser::new(paths.clients, locked_closer);
    let agent = Agent::new(config.node.clone(), config.clusterip, closer, handles)?;
    tasks.spawn(agent.auditor()?.run(shutdown.clone()));
    let ended = tokio::select! {
        ended = agent.run(events, &routes, cluster, finder_events, &shutdown) => ended.map_err(AgentError::Events),
        ended = pages => ended.map_err(AgentError::Admin),
    };
    shutdown.cancel();
    // The tasks complete their last writes, such as reports of pods.
    tasks.close();
    tasks.wait().await;
    ended
}

/// Starts what Services of the cluster need, if this node serves them: watches, Events, and routes for their addresses.
async fn start_cluster_tasks(
    config: &AgentConfig,
    stage: &watch::Sender<ProgramTakeoverStage>,
    not_ready: &NotReadyReasons,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> Result<(ClusterInbox, ServiceEvents), AgentError> {
    let ClusterConnection { client, inbox, events } =
        cluster_watch::start(config.clusterip, &config.node, tasks, shutdown).await?;
    tasks.spawn(range_routes::keep_routes(
        config.clone(),
        client,
        stage.subscribe(),
        not_ready.clone(),
        shutdown.clone(),
    ));
    Ok((inbox, events))
}

/// Subscriber identity of this agent: one agent for each node, so the node's name is enough.
fn own_subscriber(config: &AgentConfig) -> ComponentReplica {
    ComponentReplica {
        role: ClientComponent::Agent,
        name: config.node.clone(),
        node: config.node.clone(),
    }
}

/// Starts the search for this node's pods below their cgroup.
fn start_pod_finder(
    config: &AgentConfig,
    paths: &AgentPaths,
    pod_servers: PodServerDeps,
    events: mpsc::Sender<PodTrackerEvent>,
) -> Result<mpsc::Sender<finder::FinderCommand>, AgentError> {
    let namespaces = config.namespaces.clone();
    let pod_servers = config.wait_for_drain.then_some(pod_servers);
    let (cgroups, cookies) = (paths.pods.clone(), NetnsCookies::new(paths));
    let finder_config = finder::FinderConfig { cgroups, namespaces, cookies, pod_servers };
    finder::start(finder_config, events).map_err(AgentError::PodFinder)
}
