//! The activator: holds requests until a pod is ready, then forwards them.
//!
//! It stands in the way of a request only while its revision sleeps, has a hard limit, shares its name with
//! others, or comes from outside. A request waits only while no ready pod has room; a change of the table
//! lets it go in the same call that takes the change in.
//!
//! | file | subject |
//! |---|---|
//! | [`queue`] | Pure: the waiting line of one revision |
//! | [`balance`] | Pure: which pod, which revision |
//! | [`dial`] | Pure: one connection, brought about by up to 16 sockets |
//! | [`slots`] | Pure: who may use which slots of a revision with a hard limit |
//! | [`pool`] | Pure: one pod's connections and who gets them |
//! | [`host`], [`headers`], [`forwarded`], [`via`] | Pure: heads on their way |
//! | [`proxy_protocol`] | Pure: the header by which a proxy names its client |
//! | [`probe`], [`failure`] | Pure: what the platform is asked, and what is said when there is no answer |
//! | [`config`], [`budget`] | Pure: settings; what clients may take |
//! | [`gateway`], [`reply`], [`tunnel`] | Shell: one request from arrival to answer |
//! | [`h1`], [`targets`] | Pure: HTTP/1.1 as it is spoken to pods; targets that the library refuses |
//! | [`revision`], [`pods`], [`connection`] | Shell: a revision's line and the connections to its pods |
//! | [`single`], [`upload`], [`ask`], [`tcp`] | Shell: one connection in HTTP/1.1, the request on its way, its body, the socket |
//! | [`server`], [`ports`] | Shell: clients' connections; the listener, or listeners, of services |
//! | [`seats`] | Shell: what each client's connection takes, and whose requests are refused |
//! | [`socket`] | Shell: a client's socket, and whether the client is still there |
//! | [`edge`] | Shell: whose word of a request's way counts |
//! | [`request_log`] | Shell: a line of each finished request |
//! | [`routes`], [`controller`] | Shell: the RouteTable |
//! | [`autoscaler`], [`peers`] | Shell: usage reports; slots among activators |
//! | [`admin`], [`clock`] | Shell: metrics; time and chance |

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    admin::{Admin, AdminError},
    link::{Finder, Link, LinkError},
    tls::{Credentials, enrol, peer::Holder},
    wire::{self, Role, Subscriber},
};
use nix::sys::resource::{Resource, getrlimit};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

pub mod admin;
pub mod ask;
pub mod autoscaler;
pub mod balance;
pub mod budget;
pub mod clock;
pub mod config;
pub mod connection;
pub mod controller;
pub mod dial;
pub mod edge;
pub mod failure;
pub mod forwarded;
pub mod frames;
pub mod gateway;
pub mod h1;
pub mod headers;
pub mod held;
pub mod host;
pub mod peers;
pub mod pods;
pub mod pool;
pub mod ports;
pub mod probe;
pub mod proxy_protocol;
pub mod queue;
pub mod range;
pub mod reply;
pub mod request_log;
pub mod revision;
pub mod routes;
pub mod seats;
pub mod server;
pub mod single;
pub mod slots;
pub mod socket;
pub mod targets;
pub mod tcp;
pub mod tunnel;
pub mod upload;
pub mod via;

pub use config::Config;

use crate::{
    admin::{Figures, Metrics},
    autoscaler::Usage,
    config::BadSetting,
    controller::Seen,
    edge::Edges,
    gateway::{Door, Gateway},
    peers::{Peers, Streams},
    pods::PodSettings,
    ports::Ports,
    request_log::RequestLog,
    revision::RevisionSettings,
    routes::{Listed, Routes},
    seats::Seats,
    server::Server,
};

/// Idle connections and failed ports are looked after this often.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// How long lines of the last requests may take to be written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The activator could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting is out of its range.
    #[error("bad configuration")]
    Config(#[from] BadSetting),
    /// A gateway's listener could not be had.
    #[error("cannot listen for requests by host on {address}")]
    Gateway {
        /// Where.
        address: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The other activators could not be served.
    #[error("cannot hand slots to other activators")]
    Peers(#[from] LinkError),
    /// The admin port could not be served.
    #[error(transparent)]
    Admin(#[from] AdminError),
}

/// One activator, put together but not yet connected to the other parts.
#[derive(Debug)]
pub struct Activator {
    /// Carries requests.
    pub gateway: Arc<Gateway>,
    /// Serves connections.
    pub server: Arc<Server>,
    /// Listens for services.
    pub ports: Arc<Ports>,
    /// Reports waiting requests.
    pub usage: Arc<Usage>,
}

impl Activator {
    /// Puts the parts together. `shutdown` closes the listeners and asks connections to end.
    pub fn new(config: &Config, registry: &mut Registry, shutdown: &CancellationToken) -> Self {
        let metrics = Metrics::register(registry);
        let usage = Arc::new(Usage::default());
        let pods = PodSettings {
            backlog: config.pod_backlog,
            max_idle: Duration::from_millis(config.pod_idle_ms),
            metrics: metrics.clone(),
        };
        let peers = Arc::new(Peers::new(config.name(), config.peer_port, config.addresses()));
        let budget = config.budget(open_files());
        let settings = RevisionSettings {
            peers: Arc::clone(&peers),
            bounds: budget.line,
            pods,
            usage: Arc::clone(&usage),
            met: AtomicU64::new(0),
        };
        let gateway = Arc::new(Gateway {
            routes: Routes::new(settings),
            peers,
            edge: Edges::new(config.edge()),
            request_log: Arc::new(RequestLog::new(metrics.request_log.clone())),
            metrics,
            tasks: TaskTracker::new(),
            cluster_domain: config.cluster_domain.clone(),
            leaving: CancellationToken::new(),
            stop: shutdown.clone(),
            cut: CancellationToken::new(),
        });
        registry.register_collector(Box::new(Figures(Arc::clone(&gateway))));
        let seats = Arc::new(Seats::new(budget, gateway.metrics.refused.clone()));
        let server = Arc::new(Server::new(Arc::clone(&gateway), seats));
        let ports = Arc::new(Ports::new(
            Arc::clone(&server),
            Arc::clone(&gateway),
            config.addresses(),
            config.ports_map.clone(),
            shutdown.clone(),
        ));
        Self { gateway, server, ports, usage }
    }

    async fn look_after(&self) {
        let mut tick = tokio::time::interval(HOUSEKEEPING);
        loop {
            tick.tick().await;
            self.ports.retry();
            self.gateway.routes.forget_left();
            self.gateway.routes.give_up_left(Instant::now());
            for revision in self.gateway.routes.awake() {
                revision.prune();
            }
        }
    }

    /// Goes on serving while others may still be led here, for at most the linger time. Clients are asked to connect anew.
    async fn linger(&self, config: &Config) {
        let bound = config.linger();
        self.gateway.leaving.cancel();
        let mut listed = self.gateway.routes.listed();
        let left = async {
            // The sender lives in the gateway.
            let _ = listed.wait_for(|it| *it == Listed::NoMore).await;
            tokio::time::sleep(config.settle()).await;
        };
        info!(?bound, "leaving: connections are still taken");
        let is_left = tokio::time::timeout(bound, left).await.is_ok();
        info!(is_left, "no connections are taken any more");
    }

    /// Lets requests in flight end.
    async fn drain(&self, config: &Config) {
        let (tasks, bound) = (&self.gateway.tasks, config.drain());
        tasks.close();
        info!(connections = tasks.len(), ?bound, "draining");
        let cut = async {
            tokio::time::sleep(config.tunnel_drain()).await;
            self.gateway.cut.cancel();
            std::future::pending::<()>().await;
        };
        let ended = async {
            tokio::select! {
                () = tasks.wait() => {}
                () = cut => {}
            }
        };
        if tokio::time::timeout(bound, ended).await.is_err() {
            warn!(connections = tasks.len(), "connections cut off");
        }
    }
}

/// Runs the activator until `shutdown`; then it lingers until nobody is led here, and lets requests in flight end.
pub async fn run(mut config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    config.validate()?;
    let gateways = gateways(&mut config)?;
    let mut registry = Registry::default();
    let stop = CancellationToken::new();
    let activator = Activator::new(&config, &mut registry, &stop);
    for (listener, door) in gateways {
        let server = Arc::clone(&activator.server);
        tokio::spawn(server.accept(listener, Some(door), stop.clone()));
    }
    // Routes and reports outlive the signal: waiting requests still want their pod while we drain.
    let finished = CancellationToken::new();
    let links = Arc::new(Links::new(&config, &finished));
    let admin = Admin { registry, troubles: troubles(&activator, &links, &shutdown) };
    let pages = common::admin::serve(config.admin, admin, axum::Router::new(), finished.clone());
    let follow = controller::follow(
        &links.routes,
        &links.reports,
        &activator.gateway,
        &activator.ports,
        &links.seen,
    );
    let peers = Streams::new(
        Arc::clone(&activator.gateway),
        links.who.clone(),
        links.credentials.clone(),
        finished.clone(),
    );
    let end = async {
        shutdown.cancelled().await;
        activator.linger(&config).await;
        stop.cancel();
        activator.drain(&config).await;
        peers.leave().await;
        activator.gateway.request_log.flush(LAST_LINES).await;
    };
    info!(name = %config.name(), controller = %config.controller, "activator started");
    tokio::select! {
        served = pages => served.map_err(Error::from),
        served = peers.run() => served.map_err(Error::from),
        () = follow => Ok(()),
        () = activator.usage.report(&links.usage) => Ok(()),
        () = activator.look_after() => Ok(()),
        () = end => {
            finished.cancel();
            info!(name = %config.name(), "activator stopped");
            Ok(())
        }
    }
}

/// The streams to the other parts.
#[derive(Debug)]
struct Links {
    routes: Link,
    reports: Link,
    usage: Link,
    seen: Seen,
    who: Subscriber,
    credentials: Option<Arc<Credentials>>,
}

impl Links {
    fn new(config: &Config, finished: &CancellationToken) -> Self {
        let who = Subscriber {
            role: Role::Activator,
            name: config.name().to_owned(),
            node: config.node.clone(),
        };
        let credentials = config.identity.as_ref().map(|_| Credentials::new());
        let controllers =
            Finder::known_as(Holder::Controller, &config.controller, credentials.as_ref());
        let autoscalers =
            Finder::known_as(Holder::Autoscaler, &config.autoscaler, credentials.as_ref());
        if let (Some(credentials), Some(folder)) = (credentials.clone(), &config.identity) {
            let controllers = Arc::clone(&controllers);
            let files = enrol::Files::below(folder);
            tokio::spawn(enrol::keep(credentials, controllers, files, finished.clone()));
        }
        let link = |to: &Arc<Finder>| Link::to(Arc::clone(to), who.clone(), finished.clone());
        let routes = link(&controllers).tells(wire::Part::Controller, Arc::clone(&controllers));
        Self {
            routes: routes.tells(wire::Part::Autoscaler, Arc::clone(&autoscalers)),
            reports: link(&controllers),
            usage: link(&autoscalers),
            seen: Seen::default(),
            credentials,
            who,
        }
    }
}

fn troubles(
    activator: &Activator,
    links: &Arc<Links>,
    shutdown: &CancellationToken,
) -> Box<dyn Fn() -> Vec<String> + Send + Sync> {
    let (ports, links, shutdown) =
        (Arc::clone(&activator.ports), Arc::clone(links), shutdown.clone());
    Box::new(move || {
        let mut all = ports.troubles();
        let mut add = |wrong: bool, text: &str| {
            if wrong {
                all.push(text.to_owned());
            }
        };
        add(!links.seen.load(Ordering::Relaxed), "no routes received from the controller yet");
        add(!links.usage.is_up(), "no stream to the autoscaler: nobody learns of waiting requests");
        add(shutdown.is_cancelled(), "shutting down");
        all
    })
}

/// Descriptors that this process may have.
fn open_files() -> u64 {
    // Only a bad name of a limit is refused.
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(now, _most)| now)
}

/// The gateways' listeners, bound before anything else starts.
fn gateways(config: &mut Config) -> Result<Vec<(TcpListener, Door)>, Error> {
    let failed = |address: String| move |source| Error::Gateway { address, source };
    if let Some(listener) = config.outside_listener.take() {
        config.outside = None;
        let ready = listener.set_nonblocking(true).and_then(|()| TcpListener::from_std(listener));
        let given = ready.map_err(failed("a given socket".to_owned()))?;
        let mut all = gateways(config)?;
        all.push((given, Door::Outside));
        return Ok(all);
    }
    let open = |(address, door): (SocketAddr, Door)| {
        Ok((ports::listen(address).map_err(failed(address.to_string()))?, door))
    };
    config.gateways().into_iter().map(open).collect()
}
