//! Agent of one node: finds the node's pods, writes the RouteTable into the kernel's maps, and reports the pods' state.
//!
//! Modules by layer, lowest first. A module imports modules of its own layer and of lower ones.
//!
//! | layer | subject |
//! |---|---|
//! | [`config`], [`api_servers`], [`map_sizes`], [`paths`], [`incompatible`], [`pod_gauge`] | base of all others |
//! | [`service_facts`], [`standby_page`], `capabilities`, `health`, `metrics`, `clock`, `lock` | base of all others |
//! | [`net`] | sockets, addresses and rules of a network namespace, and connects to pods of other nodes |
//! | [`kernel`] | the eBPF programs, their maps, and the agent's own system calls |
//! | [`routes`] | the RouteTable on this node: its stream, and the plans that put it in force |
//! | `usage` | requests that pods have served: reports to the autoscaler, and totals of Revisions |
//! | [`pods`] | the pods of this node: search, registration, readiness and end |
//! | `connections` | scans of connections: stale ones, overdue requests, drift of gauges |
//! | [`node_check`] | checks of the node for `rouse check` |
//! | `admin` | pages of health, metrics, services and standby |
//! | `agent` | the loop that joins them |

mod admin;
mod agent;
pub mod api_servers;
mod capabilities;
mod clock;
pub mod config;
mod connections;
mod health;
pub mod incompatible;
pub mod kernel;
mod lock;
pub mod map_sizes;
mod metrics;
pub mod net;
pub mod node_check;
pub mod paths;
pub mod pod_gauge;
pub mod pods;
pub mod routes;
pub mod service_facts;
pub mod standby_page;
mod usage;

pub use capabilities::CAPABILITIES;

use std::{io, path::Path, pin::pin, sync::Arc};

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
use prometheus_client::registry::Registry;
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use crate::{
    agent::{Agent, AgentHandles, ClusterStart},
    config::AgentConfig,
    connections::{
        meshed_namespaces::task::MeshedNamespaceTask,
        stale_connections::close::StaleConnectionCloser,
    },
    health::ProxyHealth,
    kernel::{
        maps::{KernelMapError, KernelMaps},
        netns_cookies::NetnsCookies,
        program_supervisor,
        takeover_stage::ProgramTakeoverStage,
    },
    metrics::{AgentMetrics, NotReadyReasons},
    paths::AgentPaths,
    pods::{
        finder::{self, PodServerDeps},
        finder_queue::FinderQueue,
        pod_server::prestop::PreStopHooks,
        probe_marks::ProbeMarks,
        types::PodTrackerEvent,
    },
    routes::{
        activator_reports::ActivatorReports,
        api_client::ApiServerClient,
        bootstrap::BootstrapDocument,
        bootstrap_file::{BootstrapFile, BootstrapPublisher, BootstrapSources},
        cluster_watch::{self, ClusterInbox},
        event_writer::ServiceEvents,
        kubelet_kubeconfig, range_routes,
        route_stream::{self, RouteReceiver},
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
    /// The kubelet's kubeconfig gives no API server.
    #[error(transparent)]
    KubeletKubeconfig(#[from] routes::kubelet_kubeconfig::KubeletKubeconfigError),
    /// The cluster's Services cannot be watched.
    #[error(transparent)]
    ClusterWatch(#[from] routes::cluster_watch::ClusterWatchError),
    /// The admin pages cannot be served.
    #[error(transparent)]
    Admin(#[from] pages::AdminError),
}

/// Replica resolvers of the components that the agent opens streams to.
struct StreamTargets {
    controllers: Arc<ReplicaResolver>,
    autoscalers: Arc<ReplicaResolver>,
    /// Activators that get reports of ready pods.
    activators: Arc<ReplicaResolver>,
}

/// Makes the replica resolvers, and renews the certificate if an identity is configured.
fn replica_resolvers(
    config: &AgentConfig,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> StreamTargets {
    let credentials = config.identity.as_ref().map(|_| TlsCredentials::new());
    let resolver = |component, setting| {
        ReplicaResolver::with_credentials(component, setting, credentials.as_ref())
    };
    let controllers = resolver(Component::Controller, &config.controller);
    let autoscalers = resolver(Component::Autoscaler, &config.autoscaler);
    let activators = ReplicaResolver::of_listed(Component::Activator, credentials.as_ref());
    if let (Some(credentials), Some(folder)) = (&credentials, &config.identity) {
        let (own_credentials, resolver) = (Arc::clone(credentials), Arc::clone(&controllers));
        // Controllers issue the certificates, so the search for them needs none that is valid already.
        tasks.spawn(enrollment::keep_enrolled(
            own_credentials,
            resolver,
            enrollment::EnrollmentFiles::in_folder(folder),
            shutdown.clone(),
        ));
    }
    StreamTargets { controllers, autoscalers, activators }
}

/// Returns the hooks of waiting kubelets, and a token that is cancelled after `shutdown`, but not before each of them has
/// its response. A preStop request that breaks off would let the kubelet stop the pod at once, even with requests in flight.
fn shutdown_after_prestop(shutdown: CancellationToken) -> (PreStopHooks, CancellationToken) {
    let prestop_hooks = PreStopHooks::default();
    let hooks = prestop_hooks.clone();
    let end = CancellationToken::new();
    let ended = end.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            // The agent has ended for another reason.
            () = ended.cancelled() => return,
        }
        info!("agent ends once no preStop request waits");
        hooks.wait_until_none_open().await;
        ended.cancel();
    });
    (prestop_hooks, end)
}

/// Watches of the cluster's Services, Events on them, and the bootstrap file with what it gives to others.
struct ClusterSources {
    targets: StreamTargets,
    inbox: ClusterInbox,
    service_events: ServiceEvents,
    bootstrap: BootstrapPublisher,
    start: ClusterStart,
}

impl ClusterSources {
    /// Reads the bootstrap file, makes the resolvers with its replicas, and starts the watches. They run until `shutdown`,
    /// as do the tasks that write the file and Events, and that which keeps the routes for ranges of ClusterIPs.
    async fn open(
        config: &AgentConfig,
        health: &ProxyHealth,
        not_ready: &NotReadyReasons,
        programs_in_force: &OnceSignal,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) -> Result<Self, AgentError> {
        let file = config.bootstrap_file().map(|path| BootstrapFile::open(path, &config.node));
        let nothing = BootstrapDocument::new(&config.node);
        let document = file.as_ref().map_or(&nothing, BootstrapFile::document).clone();
        let start_lists = file.as_ref().map(BootstrapFile::start_lists).unwrap_or_default();
        // Remembered addresses come first: after a reboot, neither DNS nor an API server may answer yet.
        let targets = replica_resolvers(config, tasks, shutdown);
        let StreamTargets { controllers, autoscalers, .. } = &targets;
        controllers.set_remembered(document.controllers);
        autoscalers.set_remembered(document.autoscalers);
        let api_servers = cluster_watch::make_client(config, &document.api_servers).await?;
        let inbox =
            cluster_watch::start(api_servers.as_ref(), &config.node, health, tasks, shutdown);
        let client = api_servers.as_ref().map(ApiServerClient::client);
        let service_events = ServiceEvents::start(client.clone(), &config.node, tasks, shutdown);
        // Only once the programs are in force: before that, such a route would end connects that nothing redirects.
        tasks.spawn(range_routes::keep_routes(
            config.clone(),
            client,
            programs_in_force.clone(),
            not_ready.clone(),
            shutdown.clone(),
        ));
        let (bootstrap, services) = BootstrapPublisher::new(api_servers);
        if let Some(file) = file {
            let controllers = controllers.subscribe_known();
            let autoscalers = autoscalers.subscribe_known();
            let sources = BootstrapSources { services, controllers, autoscalers };
            tasks.spawn(file.keep(sources, shutdown.clone()));
        }
        let start = ClusterStart {
            mode: config.clusterip,
            api_server_addresses: config.api_server_addresses(),
            frontends: start_lists,
        };
        Ok(Self { targets, inbox, service_events, bootstrap, start })
    }
}

/// Streams to controllers, autoscalers and activators.
struct AgentStreams {
    routes: Arc<RouteReceiver>,
    reports: Outbox<PodReportKey, PodReportItem>,
    activator_reports: ActivatorReports,
    reports_ready: OnceSignal,
    usage: PodUsageReporter,
}

impl AgentStreams {
    /// Opens the streams and keeps them open until `shutdown`.
    fn open(
        config: &AgentConfig,
        targets: &StreamTargets,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) -> Self {
        let StreamTargets { controllers, autoscalers, activators } = targets;
        let link = |to: &Arc<ReplicaResolver>| {
            ComponentLink::with_resolver(Arc::clone(to), own_subscriber(config), shutdown.clone())
        };
        let routes = Arc::new(RouteReceiver::default());
        let routes_link = link(controllers)
            .with_listed_replicas(ServerComponent::Controller, Arc::clone(controllers))
            .with_listed_replicas(ServerComponent::Autoscaler, Arc::clone(autoscalers));
        let inbox = Arc::clone(&routes);
        tasks.spawn(async move { inbox.receive_batches(Arc::new(routes_link)).await });
        let (reports, reports_ready) = (Outbox::new(), OnceSignal::new());
        tasks.spawn(route_stream::report_pods(
            Arc::new(link(controllers)),
            reports.clone(),
            reports_ready.clone(),
            shutdown.clone(),
        ));
        let activator_reports =
            ActivatorReports::new(&config.node, config.activator_peer_port, Arc::clone(activators));
        // From the start, since each report states only that a pod is ready.
        let (ready_pods, activator_link) = (activator_reports.outbox(), link(activators));
        tasks.spawn(async move { activator_link.report_pods(&ready_pods).await });
        let usage = PodUsageReporter::default();
        let (totals, usage_link) = (usage.outbox(), link(autoscalers));
        tasks.spawn(async move { usage_link.report_usage(&totals).await });
        Self { routes, reports, activator_reports, reports_ready, usage }
    }
}

/// Lets connects of kernel threads go on unchanged, and starts the scans for meshed namespaces, whose connects do so
/// too. Where no client is left alone, it removes what an earlier agent has set.
///
/// The first scan has ended when this returns: the maps may be new, and connects must not follow them before.
async fn leave_clients_alone(
    config: &AgentConfig,
    paths: &AgentPaths,
    maps: &KernelMaps,
    metrics: &AgentMetrics,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> Result<(), KernelMapError> {
    let (clients, cookies) = (paths.clients.clone(), NetnsCookies::new(paths));
    let entries = maps.meshed_namespaces()?;
    let meshed = MeshedNamespaceTask::new(clients, cookies, entries, metrics.clone())?;
    maps.leave_kernel_threads(config.leaves_clients_alone());
    if config.leaves_clients_alone() {
        tasks.spawn(meshed.scan_once().await.run(shutdown.clone()));
    } else {
        meshed.clear();
    }
    Ok(())
}

/// Checks the settings, and adds the API server that the kubelet's kubeconfig names.
fn complete_settings(mut config: AgentConfig) -> Result<AgentConfig, AgentError> {
    config.validate()?;
    if let Some(path) = &config.kubelet_kubeconfig {
        config.apiservers.push(kubelet_kubeconfig::read_api_server(path)?);
    }
    Ok(config)
}

/// Returns the task that serves the agent's pages until `shutdown`, and the questions of these pages to the loop.
fn serve_pages(
    config: &AgentConfig,
    registry: Registry,
    not_ready: &NotReadyReasons,
    health: &ProxyHealth,
    shutdown: &CancellationToken,
) -> (mpsc::Receiver<admin::FactsQuery>, impl Future<Output = Result<(), pages::AdminError>> + use<>)
{
    let (facts_pages, facts_queries) = admin::facts_pages();
    let admin_pages = admin::pages(registry, not_ready.clone(), health.clone());
    let extra_pages = facts_pages.merge(node_check::page::router(config, not_ready));
    let serve = pages::serve(config.admin, admin_pages, extra_pages, shutdown.clone());
    (facts_queries, serve)
}

/// Runs the agent until `shutdown`. Its programs and map entries stay in force afterwards.
pub async fn run(config: AgentConfig, shutdown: CancellationToken) -> Result<(), AgentError> {
    let config = complete_settings(config)?;
    info!(?config, "agent starts");
    let (prestop_hooks, shutdown) = shutdown_after_prestop(shutdown);
    let (tasks, exported_totals) = (TaskTracker::new(), SharedRevisionTotals::default());
    let (metrics, registry) = admin::metrics_registry(exported_totals.clone());
    let (not_ready, health) = (NotReadyReasons::default(), ProxyHealth::default());
    not_ready.set("programs", Some("not in force yet".to_owned()));
    // Served from the first moment, so that `/readyz` gives the reason while the agent still waits.
    let (facts_queries, pages) = serve_pages(&config, registry, &not_ready, &health, &shutdown);
    let mut pages = pin!(pages);
    let (paths, (mut kernel, maps, events, locked_closer)) = tokio::select! {
        started = program_supervisor::start(&config, &not_ready) => started?,
        ended = &mut pages => return ended.map_err(AgentError::Admin),
        () = shutdown.cancelled() => return Ok(()),
    };
    not_ready.set("programs", None);
    let probe_marks = ProbeMarks::open(&paths.pins())?;
    let events = kernel::sys::register_readable(events).map_err(AgentError::Events)?;

    let (takeover_stage, takeover_stages) = watch::channel(ProgramTakeoverStage::default());
    let (in_force, earlier) = (kernel.in_force(), kernel.take_earlier_routes());
    tasks.spawn(kernel.run(takeover_stages, not_ready.clone(), metrics.clone(), shutdown.clone()));
    let cluster = ClusterSources::open(&config, &health, &not_ready, &in_force, &tasks, &shutdown);
    let cluster = cluster.await?;
    // The streams may open before the loop runs: what arrives waits in `streams.routes` and in the channels.
    let streams = AgentStreams::open(&config, &cluster.targets, &tasks, &shutdown);
    let (finder_events_tx, finder_events) = mpsc::channel(FINDER_EVENTS_MAX);
    let (pod_servers, thaw_queries) = PodServerDeps::open(&prestop_hooks, &maps)?;
    let finder_commands = start_pod_finder(&config, &paths, pod_servers.clone(), finder_events_tx)?;
    leave_clients_alone(&config, &paths, &maps, &metrics, &tasks, &shutdown).await?;
    let handles = AgentHandles {
        revision_totals: RevisionTotalsStore::resume(&maps, exported_totals),
        maps,
        probe_marks,
        finder: FinderQueue::new(finder_commands),
        reports: streams.reports,
        activator_reports: streams.activator_reports,
        usage: streams.usage,
        reports_ready: streams.reports_ready,
        bootstrap: cluster.bootstrap,
        service_events: cluster.service_events,
        metrics,
        not_ready,
        health,
        facts_queries,
        prestop_hooks,
        idle: pod_servers.idle,
        thaw_queries,
        agents_answer_queries: config.wait_for_drain,
        upgraded_drain_time: config.upgraded_drain_time(),
        takeover_stage,
    };
    let closer = StaleConnectionCloser::new(paths.clients, locked_closer);
    let agent = Agent::new(config.node, cluster.start, earlier.as_ref(), closer, handles)?;
    spawn_map_tasks(&agent, &tasks, &shutdown)?;
    let ended = tokio::select! {
        ended = agent.run(events, &streams.routes, cluster.inbox, finder_events, &shutdown) => ended.map_err(AgentError::Events),
        ended = pages => ended.map_err(AgentError::Admin),
    };
    end_tasks(&tasks, &shutdown, &paths.pods).await;
    ended
}

/// Spawns the tasks that keep map entries true beside the loop: the audit, and the promise to thaw frozen pods.
fn spawn_map_tasks(
    agent: &Agent,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> Result<(), AgentError> {
    tasks.spawn(agent.auditor()?.run(shutdown.clone()));
    tasks.spawn(agent.thaw_promise_task()?.run(shutdown.clone()));
    Ok(())
}

/// Ends all tasks. They complete their last writes, such as reports of pods. A pod below the cgroup `pods` that is still
/// frozen is thawed: the loop may have ended by an error.
async fn end_tasks(tasks: &TaskTracker, shutdown: &CancellationToken, pods: &Path) {
    kernel::freezer::thaw_all(pods);
    shutdown.cancel();
    tasks.close();
    tasks.wait().await;
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
