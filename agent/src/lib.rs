//! Agent of one node: finds the node's pods, writes the RouteTable into the kernel's maps, and reports the pods' state.
//!
//! | module | what |
//! |---|---|
//! | [`readiness`], [`pods`] | pure: readiness of one pod; state of each pod and the actions that follow from it |
//! | [`plan`] | pure: from the RouteTable to ordered writes of the kernel's maps |
//! | `listeners` | pure: the kernel's counts of listeners |
//! | [`reachability`] | pure: reachability of the pods of other nodes |
//! | [`cgroups`], `cgroup_search` | pure: the layouts of pods' cgroups; the layout of this node |
//! | [`pod_server`] | pod server: the port in each pod's namespace that the kubelet and other nodes' agents call |
//! | [`maps`], [`sys`] | the kernel's maps and the agent's own system calls |
//! | `pods/finder`, `pods/namespace`, `pods/probe_marks` | cgroups, namespaces, and the marks of probes in the kernel |
//! | [`sockdiag`] | the TCP sockets of a namespace: listing and closing them |
//! | [`idle_connections`] | pure: stale connections to close; `idle_connections/pod_query` asks pods, `idle_connections/close` and [`idle_connections::locked_close`] close them |
//! | `revision_totals` | pure: totals of each Revision; `revision_totals_store` keeps them, `admin/revision_metrics` exports them |
//! | `deadlines` | pure: pods that may have overdue requests; `deadlines/scan` scans them and closes connections |
//! | [`audit`] | pure: drift of gauges from the pods' sockets; `audit/scan` scans and corrects |
//! | `btf` | pure: offsets of the fields of the kernel's sockets |
//! | `agent` | the loop that joins them |
//! | `route_stream`, `usage_reporter`, `admin` | the streams, health and metrics |

mod admin;
mod agent;
pub mod audit;
mod btf;
mod cgroup_search;
pub mod cgroups;
mod clock;
pub mod config;
mod deadlines;
pub mod features;
mod growth_throttle;
pub mod idle_connections;
pub mod incompatible;
mod listener_counts;
pub mod maps;
mod netfilter;
mod netlink;
pub mod netns_cookies;
pub mod plan;
pub mod pod_server;
mod pod_slots;
pub mod pods;
mod program_supervisor;
pub mod programs;
pub mod reachability;
pub mod readiness;
mod revision_totals;
mod revision_totals_store;
mod route_stream;
pub mod sockdiag;
pub mod sys;
mod usage_reporter;

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use common::{
    admin as pages,
    link::{ComponentLink, PodReportKey, ReplicaResolver},
    outbox::Outbox,
    tls::{TlsCredentials, enrol, peer::CertificateRole},
    wire::{ComponentReplica, ComponentRole, PodReportItem, ServerComponent},
};
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use crate::{
    admin::{AgentMetrics, NotReadyReasons},
    agent::{Agent, AgentHandles},
    config::{AgentConfig, AgentPaths},
    idle_connections::close::StaleConnectionCloser,
    netns_cookies::NetnsCookies,
    pod_server::prestop::PreStopHooks,
    pods::{finder::PodServerDeps, probe_marks::ProbeMarks},
    revision_totals_store::RevisionTotalsStore,
    route_stream::RouteBatchStream,
};

/// Capabilities that the agent needs, each with its reason. A manifest gives it these, besides user 0, the host's
/// network and process namespaces, and the host's `/sys/fs/bpf` and `/sys/fs/cgroup`.
///
/// `tests/kernel/agent.rs` runs every agent with exactly these. Not needed are `DAC_OVERRIDE` (user 0 owns all files it
/// touches) and `KILL` (the canary is its own child). Neither is `NET_RAW` (it opens TCP, UDP and netlink sockets
/// only).
pub const CAPABILITIES: [(&str, &str); 3] = [
    (
        "SYS_ADMIN",
        "enters pods' network namespaces (setns), for which nothing less is enough; it includes what loading and attaching \
         programs needs (BPF, PERFMON), which is therefore not asked for",
    ),
    (
        "NET_ADMIN",
        "ends kept connections in clients' namespaces, and those of requests that take too long in pods' (SOCK_DESTROY)",
    ),
    ("SYS_PTRACE", "opens /proc/PID/ns/net of processes that have capabilities the agent has not"),
];

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
    Programs(#[from] programs::EbpfProgramsError),
    /// A kernel map cannot be opened, read or written.
    #[error(transparent)]
    Maps(#[from] maps::KernelMapError),
    /// The ring of kernel events cannot be polled.
    #[error("cannot wait for the kernel's events")]
    Events(#[source] io::Error),
    /// The search for pods cannot start.
    #[error("cannot start looking for pods")]
    PodFinder(#[source] io::Error),
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
    let find = |holder, text| ReplicaResolver::known_as(holder, text, credentials.as_ref());
    let controllers = find(CertificateRole::Controller, &config.controller);
    let autoscalers = find(CertificateRole::Autoscaler, &config.autoscaler);
    if let (Some(credentials), Some(folder)) = (&credentials, &config.identity) {
        let (own, to) = (Arc::clone(credentials), Arc::clone(&controllers));
        tasks.spawn(enrol::keep(own, to, enrol::EnrollmentFiles::below(folder), shutdown.clone()));
    }
    (controllers, autoscalers)
}

/// Returns a token that is cancelled after `asked`, but not before each waiting kubelet has its response. A preStop
/// request that breaks off would let the kubelet stop the pod at once, even with requests in flight.
fn shutdown_after_prestop(asked: CancellationToken, drains: PreStopHooks) -> CancellationToken {
    let end = CancellationToken::new();
    let ended = end.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = asked.cancelled() => {}
            // The token was cancelled for another reason: there is nothing left to wait for.
            () = ended.cancelled() => return,
        }
        info!("agent ends once no pod is waited for");
        drains.wait_until_all_answered().await;
        ended.cancel();
    });
    end
}

/// Streams to the controllers and the autoscalers.
struct AgentOutboundStreams {
    routes: Arc<RouteBatchStream>,
    reports: Outbox<PodReportKey, PodReportItem>,
    reports_ready: CancellationToken,
    usage: usage_reporter::PodUsageReporter,
}

impl AgentOutboundStreams {
    /// Opens the streams and keeps them open until `shutdown`.
    fn open(config: &AgentConfig, tasks: &TaskTracker, shutdown: &CancellationToken) -> Self {
        let (controllers, autoscalers) = replica_resolvers(config, tasks, shutdown);
        let link = |to: &Arc<ReplicaResolver>| {
            ComponentLink::to(Arc::clone(to), own_subscriber(config), shutdown.clone())
        };
        let routes = Arc::new(RouteBatchStream::default());
        let routes_link = link(&controllers)
            .tells(ServerComponent::Controller, Arc::clone(&controllers))
            .tells(ServerComponent::Autoscaler, Arc::clone(&autoscalers));
        let following = Arc::clone(&routes);
        tasks.spawn(async move { following.receive_batches(Arc::new(routes_link)).await });
        let (reports, reports_ready) = (Outbox::new(), CancellationToken::new());
        tasks.spawn(route_stream::report_pods(
            Arc::new(link(&controllers)),
            reports.clone(),
            reports_ready.clone(),
            shutdown.clone(),
        ));
        let usage = usage_reporter::PodUsageReporter::default();
        let (totals, usage_link) = (usage.outbox(), link(&autoscalers));
        tasks.spawn(async move { usage_link.report_usage(&totals).await });
        Self { routes, reports, reports_ready, usage }
    }
}

/// Runs the agent until `shutdown`. Its programs and map entries stay in force afterwards.
pub async fn run(config: AgentConfig, shutdown: CancellationToken) -> Result<(), AgentError> {
    config.validate()?;
    info!(?config, "agent starts");
    let drains = PreStopHooks::default();
    let shutdown = shutdown_after_prestop(shutdown, drains.clone());
    let tasks = TaskTracker::new();
    let shown = revision_totals_store::SharedRevisionTotals::default();
    let (metrics, registry) = AgentMetrics::new(shown.clone());
    let troubles = NotReadyReasons::default();
    troubles.set("programs", Some("not in force yet".to_owned()));
    // Served from the first moment, so that `/readyz` gives the reason while the agent still waits.
    let pages = pages::serve(
        config.admin,
        admin::pages(registry, troubles.clone()),
        axum::Router::new(),
        shutdown.clone(),
    );
    let mut pages = std::pin::pin!(pages);
    let (places, (kernel, maps, events, ender)) = tokio::select! {
        started = program_supervisor::start(&config, &troubles) => started?,
        ended = &mut pages => return ended.map_err(AgentError::Admin),
        () = shutdown.cancelled() => return Ok(()),
    };
    troubles.set("programs", None);
    let marks = ProbeMarks::open(&places.pins())?;
    let events = sys::register_readable(events).map_err(AgentError::Events)?;

    let (stage, stages) = watch::channel(program_supervisor::ProgramTakeoverStage::default());
    tasks.spawn(kernel.run(stages, troubles.clone(), metrics.clone(), shutdown.clone()));
    // The streams may open before the loop runs: what arrives waits in `routes` and in the channels.
    let AgentOutboundStreams { routes, reports, reports_ready: settled, usage } =
        AgentOutboundStreams::open(&config, &tasks, &shutdown);
    let (found, finds) = mpsc::channel(FINDER_EVENTS_MAX);
    let answers = PodServerDeps { prestop_hooks: drains.clone(), conns: maps.conns() };
    let finder = start_pod_finder(&config, &places, answers, found)?;
    let revisions = RevisionTotalsStore::resume(&maps, shown);
    let ends = AgentHandles {
        maps,
        probe_marks: marks,
        finder_commands: finder,
        reports,
        usage,
        revision_totals: revisions,
        reports_ready: settled,
        metrics,
        not_ready: troubles,
        prestop_hooks: drains,
        tunnel_drain: config.tunnel_drain(),
        takeover_stage: stage,
    };
    let agent =
        Agent::new(config.node.clone(), StaleConnectionCloser::new(places.clients, ender), ends)?;
    tasks.spawn(agent.auditor()?.run(shutdown.clone()));
    let ended = tokio::select! {
        ended = agent.run(events, &routes, finds, &shutdown) => ended.map_err(AgentError::Events),
        ended = pages => ended.map_err(AgentError::Admin),
    };
    shutdown.cancel();
    // Their last writes, such as reports of pods, are waited for.
    tasks.close();
    tasks.wait().await;
    ended
}

/// Subscriber identity of this agent: one agent for each node, so the node's name is enough.
fn own_subscriber(config: &AgentConfig) -> ComponentReplica {
    ComponentReplica {
        role: ComponentRole::Agent,
        name: config.node.clone(),
        node: config.node.clone(),
    }
}

/// Starts the search for this node's pods below their cgroup.
fn start_pod_finder(
    config: &AgentConfig,
    places: &AgentPaths,
    answers: PodServerDeps,
    found: mpsc::Sender<pods::PodTrackerEvent>,
) -> Result<mpsc::Sender<pods::finder::FinderCommand>, AgentError> {
    let namespaces = config.namespaces.clone();
    let answers = config.wait_for_drain.then_some(answers);
    let (cgroups, cookies) = (places.pods.clone(), NetnsCookies::new(places));
    let places = pods::finder::FinderConfig { cgroups, namespaces, cookies, pod_servers: answers };
    pods::finder::start(places, found).map_err(AgentError::PodFinder)
}

/// Locks a mutex, and ignores the poison of a panic: no lock of this crate guards a half-done change.
pub(crate) fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}
