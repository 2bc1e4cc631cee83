//! Agent of one node: finds the node's pods, writes the RouteTable into the kernel's maps, and reports the pods' state.
//!
//! | module | what |
//! |---|---|
//! | [`probe`], [`pods`] | pure: readiness of one pod; state of each pod and the actions that follow from it |
//! | [`plan`] | pure: from the RouteTable to ordered writes of the kernel's maps |
//! | `listeners` | pure: the kernel's counts of listeners |
//! | [`reach`] | pure: reachability of the pods of other nodes |
//! | [`cgroups`], `kubepods` | pure: the layouts of pods' cgroups; the layout of this node |
//! | [`door`] | pod server: the port in each pod's namespace that the kubelet and other nodes' agents call |
//! | [`maps`], [`sys`] | the kernel's maps and the agent's own system calls |
//! | `pods/find`, `pods/namespace`, `pods/mark` | cgroups, namespaces, and the marks of probes in the kernel |
//! | [`sockdiag`] | the TCP sockets of a namespace: listing and closing them |
//! | [`kept`] | pure: stale connections to close; `kept/ask` asks pods, `kept/end` and [`kept::locked`] close them |
//! | `tallies` | pure: totals of each Revision; `revisions` keeps them, `admin/revisions` exports them |
//! | `deadlines` | pure: pods that may have overdue requests; `deadlines/end` scans them and closes connections |
//! | [`audit`] | pure: drift of gauges from the pods' sockets; `audit/look` scans and corrects |
//! | `btf` | pure: offsets of the fields of the kernel's sockets |
//! | `agent` | the loop that joins them |
//! | `controller`, `autoscaler`, `admin` | the streams, health and metrics |

mod admin;
mod agent;
pub mod audit;
mod autoscaler;
mod btf;
pub mod cgroups;
mod clock;
pub mod config;
mod controller;
pub mod cookies;
mod deadlines;
pub mod door;
pub mod features;
mod growth;
pub mod kept;
mod kernel;
mod kubepods;
mod listeners;
pub mod maps;
mod netfilter;
mod netlink;
pub mod oddities;
pub mod plan;
pub mod pods;
pub mod probe;
pub mod programs;
pub mod reach;
mod revisions;
mod slots;
pub mod sockdiag;
pub mod sys;
mod tallies;

use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use common::{
    admin as pages,
    link::{Finder, Link, PodKey},
    outbox::Outbox,
    tls::{Credentials, enrol, peer::Holder},
    wire::{Part, PodItem, Role, Subscriber},
};
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::info;

use crate::{
    admin::{Metrics, Troubles},
    agent::{Agent, Ends},
    config::{Config, Places},
    controller::Routes,
    cookies::Cookies,
    door::drain::Drains,
    kept::end::Clients,
    pods::{find::Answers, mark::Marks},
    revisions::Revisions,
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
const FOUND: usize = 1_024;

/// Reason for which an agent stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] config::Invalid),
    /// The eBPF programs cannot be loaded or attached.
    #[error(transparent)]
    Programs(#[from] programs::Error),
    /// A kernel map cannot be opened, read or written.
    #[error(transparent)]
    Maps(#[from] maps::Error),
    /// The ring of kernel events cannot be polled.
    #[error("cannot wait for the kernel's events")]
    Events(#[source] io::Error),
    /// The search for pods cannot start.
    #[error("cannot start looking for pods")]
    Find(#[source] io::Error),
    /// The admin pages cannot be served.
    #[error(transparent)]
    Admin(#[from] pages::AdminError),
}

/// Makes the replica resolvers of controller and autoscaler, and renews the certificate if an identity is configured.
fn finders(
    config: &Config,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) -> (Arc<Finder>, Arc<Finder>) {
    let credentials = config.identity.as_ref().map(|_| Credentials::new());
    let find = |holder, text| Finder::known_as(holder, text, credentials.as_ref());
    let controllers = find(Holder::Controller, &config.controller);
    let autoscalers = find(Holder::Autoscaler, &config.autoscaler);
    if let (Some(credentials), Some(folder)) = (&credentials, &config.identity) {
        let (own, to) = (Arc::clone(credentials), Arc::clone(&controllers));
        tasks.spawn(enrol::keep(own, to, enrol::Files::below(folder), shutdown.clone()));
    }
    (controllers, autoscalers)
}

/// Returns a token that is cancelled after `asked`, but not before each waiting kubelet has its response. A preStop
/// request that breaks off would let the kubelet stop the pod at once, even with requests in flight.
fn when_answered(asked: CancellationToken, drains: Drains) -> CancellationToken {
    let end = CancellationToken::new();
    let ended = end.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = asked.cancelled() => {}
            // The token was cancelled for another reason: there is nothing left to wait for.
            () = ended.cancelled() => return,
        }
        info!("agent ends once no pod is waited for");
        drains.all_answered().await;
        ended.cancel();
    });
    end
}

/// Streams to the controllers and the autoscalers.
struct Streams {
    routes: Arc<Routes>,
    reports: Outbox<PodKey, PodItem>,
    settled: CancellationToken,
    usage: autoscaler::Usage,
}

impl Streams {
    /// Opens the streams and keeps them open until `shutdown`.
    fn open(config: &Config, tasks: &TaskTracker, shutdown: &CancellationToken) -> Self {
        let (controllers, autoscalers) = finders(config, tasks, shutdown);
        let link = |to: &Arc<Finder>| Link::to(Arc::clone(to), ourselves(config), shutdown.clone());
        let routes = Arc::new(Routes::default());
        let routes_link = link(&controllers)
            .tells(Part::Controller, Arc::clone(&controllers))
            .tells(Part::Autoscaler, Arc::clone(&autoscalers));
        let following = Arc::clone(&routes);
        tasks.spawn(async move { following.follow(Arc::new(routes_link)).await });
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
        Self { routes, reports, settled, usage }
    }
}

/// Runs the agent until `shutdown`. Its programs and map entries stay in force afterwards.
pub async fn run(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    config.validate()?;
    info!(?config, "agent starts");
    let drains = Drains::default();
    let shutdown = when_answered(shutdown, drains.clone());
    let tasks = TaskTracker::new();
    let shown = revisions::Shown::default();
    let (metrics, registry) = Metrics::new(shown.clone());
    let troubles = Troubles::default();
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
        started = kernel::start(&config, &troubles) => started?,
        ended = &mut pages => return ended.map_err(Error::Admin),
        () = shutdown.cancelled() => return Ok(()),
    };
    troubles.set("programs", None);
    let marks = Marks::open(&places.pins())?;
    let events = sys::readable(events).map_err(Error::Events)?;

    let (stage, stages) = watch::channel(kernel::Stage::default());
    tasks.spawn(kernel.watch(stages, troubles.clone(), metrics.clone(), shutdown.clone()));
    // The streams may open before the loop runs: what arrives waits in `routes` and in the channels.
    let Streams { routes, reports, settled, usage } = Streams::open(&config, &tasks, &shutdown);
    let (found, finds) = mpsc::channel(FOUND);
    let answers = Answers { drains: drains.clone(), conns: maps.conns() };
    let finder = look_for_pods(&config, &places, answers, found)?;
    let revisions = Revisions::resume(&maps, shown);
    let ends = Ends {
        maps,
        marks,
        finder,
        reports,
        usage,
        revisions,
        settled,
        metrics,
        troubles,
        drains,
        tunnel_drain: config.tunnel_drain(),
        stage,
    };
    let agent = Agent::new(config.node.clone(), Clients::new(places.clients, ender), ends)?;
    tasks.spawn(agent.auditor()?.run(shutdown.clone()));
    let ended = tokio::select! {
        ended = agent.run(events, &routes, finds, &shutdown) => ended.map_err(Error::Events),
        ended = pages => ended.map_err(Error::Admin),
    };
    shutdown.cancel();
    // Their last writes, such as reports of pods, are waited for.
    tasks.close();
    tasks.wait().await;
    ended
}

/// Subscriber identity of this agent: one agent for each node, so the node's name is enough.
fn ourselves(config: &Config) -> Subscriber {
    Subscriber { role: Role::Agent, name: config.node.clone(), node: config.node.clone() }
}

/// Starts the search for this node's pods below their cgroup.
fn look_for_pods(
    config: &Config,
    places: &Places,
    answers: Answers,
    found: mpsc::Sender<pods::Event>,
) -> Result<mpsc::Sender<pods::find::Command>, Error> {
    let namespaces = config.namespaces.clone();
    let answers = config.wait_for_drain.then_some(answers);
    let (cgroups, cookies) = (places.pods.clone(), Cookies::new(places));
    let places = pods::find::Places { cgroups, namespaces, cookies, answers };
    pods::find::start(places, found).map_err(Error::Find)
}

/// Locks a mutex, and ignores the poison of a panic: no lock of this crate guards a half-done change.
pub(crate) fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}
