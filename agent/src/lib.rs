//! The node's agent: finds the pods of this node, tells the kernel of them, and reports what they do.
//!
//! | module | what |
//! |---|---|
//! | [`probe`], [`pods`] | pure: whether a pod is ready; what follows from what is known of it |
//! | [`plan`] | pure: from the RouteTable to ordered writes of the kernel's maps |
//! | `listeners` | pure: what the kernel's counts of listeners say |
//! | [`reach`] | pure: which pods of other nodes this one is known to reach |
//! | [`cgroups`], `kubepods` | pure: the layouts of pods' cgroups; the one of this node |
//! | [`door`] | the port in each pod's namespace where the kubelet and other nodes' agents ask |
//! | [`maps`], [`sys`] | the kernel's maps and the agent's own system calls |
//! | `pods/find`, `pods/namespace`, `pods/ask`, `pods/mark` | cgroups, namespaces, probes and how the kernel knows them |
//! | [`sockdiag`] | the TCP sockets of a namespace, listed and ended |
//! | [`kept`] | pure: which kept connections to end; `kept/ask` asks pods, `kept/end` ends them, [`kept::locked`] under their locks |
//! | `tallies` | pure: what the requests of each revision came to; `revisions` keeps it, `admin/revisions` shows it |
//! | `deadlines` | pure: which pods to look into for requests that take too long; `deadlines/end` looks and ends them |
//! | [`audit`] | pure: whether gauges have drifted from the pods' sockets; `audit/look` compares them and puts them right |
//! | `btf` | pure: where fields of the kernel's sockets are |
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

/// The capabilities that the agent needs, each with its reason: what a manifest gives it, besides user 0, the host's
/// network and process namespaces, and the host's `/sys/fs/bpf` and `/sys/fs/cgroup`.
///
/// `tests/kernel/agent.rs` runs every agent with these and no others. Not needed: `DAC_OVERRIDE` (user 0 owns all files it
/// touches), `KILL` (the canary is its own child), `NET_RAW` (it makes TCP, UDP and netlink sockets only).
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

/// Finds the replicas of controller and autoscaler, and keeps a certificate where there is to be one.
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

/// What ends when `asked` to, but not before the last kubelet that waits for a pod has its answer: a question that breaks
/// off lets it stop the pod at once, whatever that still does.
fn when_answered(asked: CancellationToken, drains: Drains) -> CancellationToken {
    let end = CancellationToken::new();
    let ended = end.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = asked.cancelled() => {}
            () = ended.cancelled() => return,
        }
        info!("agent ends once no pod is waited for");
        drains.all_answered().await;
        ended.cancel();
    });
    end
}

/// The streams to the other parts.
struct Streams {
    routes: Arc<Routes>,
    reports: Outbox<PodKey, PodItem>,
    settled: CancellationToken,
    usage: autoscaler::Usage,
}

impl Streams {
    /// Keeps them open until `shutdown`.
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

/// Runs the agent until `shutdown`. What it wrote into the kernel stays in force.
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
    // From the first moment on: whoever waits for the agent learns what it waits for.
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
    tasks.close();
    tasks.wait().await;
    ended
}

/// As the other parts know this agent: there is one a node.
fn ourselves(config: &Config) -> Subscriber {
    Subscriber { role: Role::Agent, name: config.node.clone(), node: config.node.clone() }
}

/// Starts looking for this node's pods below their cgroup.
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

/// What a mutex guards, also after a panic of who held it: nothing is left half done under any lock here.
pub(crate) fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}
