//! The activator: queues requests until a pod is ready, then forwards them.
//!
//! It forwards a request only while the request's Revision is asleep, has a hard limit, shares its name with others, or
//! is called from outside. A request waits only while no ready pod has capacity. The call that applies a change of the
//! RouteTable also dispatches the requests that need not wait any longer.
//!
//! Modules by layer, the lowest first. A module imports modules of its own layer and of lower ones.
//!
//! | module | subject |
//! |---|---|
//! | [`clock`], [`tcp_socket`] | Shell: time and random numbers; listeners and keep-alive |
//! | [`budget`], [`request_error`] | Pure: bounds on what clients may use; responses to failed requests |
//! | [`entrypoint`], [`h1`] | Pure: listeners by which requests come in; HTTP/1.1 as bytes |
//! | [`grpc`] | Pure: requests of gRPC, and statuses of gRPC in place of HTTP's |
//! | [`route_facts`], [`traced_request`] | Pure: facts about the routes in force, as pages have them; their queries |
//! | [`config`], [`metrics`] | settings; counters and gauges |
//! | [`edge`] | heads of requests and responses, and whose information about a client is trusted |
//! | [`telemetry`] | spans and metrics of requests, and their export |
//! | [`tls`] | certificates of hosts at the gateway, the choice of one for each handshake, and client CAs |
//! | [`clients`] | client connections: their sockets, and the memory that they use |
//! | [`slots`] | slots of Revisions with a hard limit, shared by the activators |
//! | [`pods`] | pods, the connections to them, and the exchanges over these |
//! | [`revisions`] | wait queues, and the permits by which requests go to pods |
//! | [`routes`] | the RouteTable, as requests look it up |
//! | [`requests`] | requests, from their arrival to the end of their responses |
//! | [`listeners`] | listeners, and the client connections that they accept |
//! | [`peer_streams`], [`agent_reports`] | streams of slots between activators; reports of agents about ready pods |
//! | [`route_stream`] | the stream of the RouteTable |
//! | `debug_pages` | pages about the routes in force |

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    admin::{AdminError, AdminState},
    component::Component,
    enrollment,
    link::{ComponentLink, LinkError, PodReportKey, ReplicaResolver},
    once_signal::OnceSignal,
    outbox::Outbox,
    tls::TlsCredentials,
    wire::{self, ClientComponent, ComponentReplica, PodReportItem},
};
use nix::sys::resource::{Resource, getrlimit};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

pub mod agent_reports;
pub mod budget;
pub mod clients;
pub mod clock;
pub mod config;
mod debug_pages;
pub mod edge;
pub mod entrypoint;
pub mod grpc;
pub mod h1;
pub mod listeners;
pub mod metrics;
pub mod peer_streams;
pub mod pods;
pub mod request_error;
pub mod requests;
pub mod revisions;
pub mod route_facts;
pub mod route_stream;
pub mod routes;
pub mod slots;
pub mod tcp_socket;
pub mod telemetry;
pub mod tls;
pub mod traced_request;

pub use config::ActivatorConfig;

use crate::{
    clients::connections::ClientConnections,
    config::{ActivatorConfigError, GatewayAddress},
    edge::policy::EdgePolicy,
    entrypoint::{ClientTransport, Entrypoint},
    listeners::{
        client_server::ClientConnectionServer, gateway_ports::GatewayPortListeners,
        service_ports::ServicePortListeners,
    },
    metrics::ActivatorMetrics,
    peer_streams::PeerStreams,
    pods::endpoint::PodConnectionSettings,
    requests::{forwarder::RequestForwarder, request_log::RequestLogger},
    revisions::{
        revision::{RevisionContext, RevisionQueueMetrics},
        usage_reporter::QueueUsageReporter,
    },
    route_stream::RoutesReceivedFlag,
    routes::{
        index::{ActivatorListing, RouteIndex},
        revision_metrics::RevisionQueueCollector,
    },
    slots::peers::Peers,
    telemetry::{
        otlp_metrics::RevisionGauges, recorder::TelemetryRecorder,
        request_metrics::RequestMetricsCollector,
    },
    tls::{
        certificate_files::{CertificateFileError, CertificateFiles, FileCertificate},
        client_cas::ClientCas,
        host_certificates::HostCertificates,
    },
};

/// Interval at which idle connections and failed ports are checked.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for writing the log lines of the last requests.
const LOG_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Error because of which the activator could not start or continue.
#[derive(Debug, thiserror::Error)]
pub enum ActivatorError {
    /// A setting is out of its range.
    #[error("bad configuration")]
    Config(#[from] ActivatorConfigError),
    /// The listener of a gateway could not be opened.
    #[error("cannot listen for requests by host on {address}")]
    Gateway {
        /// Address of the listener, or a description of a given one.
        address: String,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// Files with certificates of the TLS gateway cannot be used.
    #[error("cannot use the certificate files")]
    Certificates(#[from] CertificateFileError),
    /// The port for other activators and for agents could not be served.
    #[error("cannot serve the port for other activators")]
    Peers(#[from] LinkError),
    /// The admin port could not be served.
    #[error(transparent)]
    Admin(#[from] AdminError),
}

/// One activator, assembled but not yet connected to the other components.
#[derive(Debug)]
pub struct ActivatorInstance {
    /// Forwarder of requests to pods.
    pub forwarder: Arc<RequestForwarder>,
    /// Server of client connections.
    pub server: Arc<ClientConnectionServer>,
    /// Listeners of the services' own ports.
    pub ports: Arc<ServicePortListeners>,
    /// Listeners of gateway ports.
    pub gateway_ports: Arc<GatewayPortListeners>,
    /// Reporter of waiting requests to the autoscaler.
    pub usage_reporter: Arc<QueueUsageReporter>,
    /// Reports to the controllers.
    pub reports: Outbox<PodReportKey, PodReportItem>,
}

impl ActivatorInstance {
    /// Assembles an activator. `stop_listeners` closes the listeners and asks connections to end.
    pub fn new(
        config: &ActivatorConfig,
        registry: &mut Registry,
        stop_listeners: &CancellationToken,
    ) -> Self {
        let metrics = ActivatorMetrics::register(registry);
        let usage_reporter = Arc::new(QueueUsageReporter::default());
        let pod_settings = PodConnectionSettings {
            listen_backlog: config.pod_backlog,
            max_idle: Duration::from_millis(config.pod_idle_ms),
            metrics: metrics.clone(),
        };
        let peers = Peers::new(config.name(), config.peer_port, config.listen_addresses());
        let (budget, reports) = (config.budget(open_file_limit()), Outbox::new());
        let revision_context = RevisionContext {
            peers: Arc::new(peers),
            queue_bounds: budget.wait_queue,
            pod_settings,
            usage_reporter: Arc::clone(&usage_reporter),
            next_pod_id: AtomicU64::new(0),
            reports: reports.clone(),
        };
        // The settings of the command line are in force until the RouteTable adds its own.
        let edge_policy = EdgePolicy::new(config.edge_settings());
        let certificates = HostCertificates::new(metrics.tls.clone());
        certificates.set_tls(&edge_policy.current());
        let telemetry = TelemetryRecorder::new(
            config.name(),
            metrics.spans.clone(),
            metrics.metric_messages.clone(),
        );
        let forwarder = Arc::new(RequestForwarder {
            telemetry: Arc::new(telemetry),
            routes: Arc::new(RouteIndex::new(revision_context)),
            edge_policy,
            certificates: Arc::new(certificates),
            client_cas: ClientCas::default(),
            request_log: Arc::new(RequestLogger::new(metrics.request_log.clone())),
            metrics,
            tcp: Default::default(),
            tasks: TaskTracker::new(),
            cluster_domain: config.cluster_domain.clone(),
            reconnect_clients: OnceSignal::new(),
            close_when_idle: stop_listeners.clone(),
            close_upgraded: CancellationToken::new(),
            has_fast_path: !config.no_fast_path,
        });
        // Only now, because their gauges read the routes of the forwarder.
        register_request_metrics(&forwarder, registry);
        let client_connections =
            Arc::new(ClientConnections::new(budget, forwarder.metrics.refusals.clone()));
        let server =
            Arc::new(ClientConnectionServer::new(Arc::clone(&forwarder), client_connections));
        let ports = Arc::new(ServicePortListeners::new(
            Arc::clone(&server),
            Arc::clone(&forwarder),
            config.listen_addresses(),
            config.ports_map.clone(),
            stop_listeners.clone(),
        ));
        let gateway_ports = Arc::new(GatewayPortListeners::new(
            Arc::clone(&server),
            Arc::clone(&forwarder),
            config.gateway_ips(),
            stop_listeners.clone(),
        ));
        Self { forwarder, server, ports, gateway_ports, usage_reporter, reports }
    }

    /// Pages about the routes in force, for the admin port.
    pub fn debug_pages(&self) -> axum::Router {
        debug_pages::debug_pages(Arc::clone(&self.forwarder), Arc::clone(&self.server))
    }

    /// Serves the connections of the gateways until `stop_listeners`.
    fn serve_gateways(&self, gateways: Vec<GatewayListener>, stop_listeners: &CancellationToken) {
        for GatewayListener { listener, entrypoint, transport } in gateways {
            let (server, closed) = (Arc::clone(&self.server), stop_listeners.clone());
            match transport {
                ClientTransport::Plain => {
                    tokio::spawn(server.run_listener(listener, Some(entrypoint), closed))
                }
                ClientTransport::Tls => {
                    tokio::spawn(server.run_tls_listener(listener, entrypoint, closed))
                }
            };
        }
    }

    /// Puts certificates of files in force, and reads the files again when they change, until `stop`.
    fn follow_certificate_files(
        &self,
        files: CertificateFiles,
        read: Vec<FileCertificate>,
        stop: &CancellationToken,
    ) {
        if !files.is_empty() {
            let certificates = &self.forwarder.certificates;
            certificates.set_files(read);
            tokio::spawn(files.watch(Arc::clone(certificates), stop.clone()));
        }
    }

    async fn run_housekeeping(&self) {
        let mut tick = tokio::time::interval(HOUSEKEEPING_INTERVAL);
        loop {
            tick.tick().await;
            self.ports.retry_failed();
            self.gateway_ports.retry_failed();
            // Requests may still hold a Revision that the RouteTable has removed, so no event tells that it can be
            // dropped.
            self.forwarder.routes.drop_unreferenced_revisions();
            self.forwarder.routes.drop_unused_plain_services();
            self.forwarder.routes.fail_missing_revisions(Instant::now());
            let plain = self.forwarder.routes.plain_revisions();
            for revision in self.forwarder.routes.revisions_with_pods().into_iter().chain(plain) {
                revision.prune_connections();
            }
        }
    }

    /// Continues to serve while clients may still be routed here, for at most the linger time. Clients are asked to
    /// reconnect.
    async fn linger(&self, config: &ActivatorConfig) {
        // Kubernetes removes a stopping pod from EndpointSlices, but clients learn of that later: until then each new
        // connection has to be accepted.
        let bound = config.linger();
        self.forwarder.reconnect_clients.set();
        let mut listed = self.forwarder.routes.subscribe_listing();
        let unlisted = async {
            // The sender cannot be gone, since it is in the forwarder.
            let _ = listed.wait_for(|it| *it == ActivatorListing::Removed).await;
            // Kube-proxies of other nodes follow EndpointSlices later than this activator follows the table.
            tokio::time::sleep(config.propagation_delay()).await;
        };
        info!(?bound, "leaving: connections are still taken");
        let is_left = tokio::time::timeout(bound, unlisted).await.is_ok();
        info!(is_left, "no connections are taken any more");
    }

    /// Waits for requests in flight to end, for at most the drain time.
    async fn drain(&self, config: &ActivatorConfig) {
        let (tasks, bound) = (&self.forwarder.tasks, config.drain());
        tasks.close();
        info!(connections = tasks.len(), ?bound, "draining");
        // Upgraded connections and those of raw TCP can last forever. They get a part of the drain time only.
        let cut_upgraded = async {
            tokio::time::sleep(config.upgraded_drain()).await;
            self.forwarder.close_upgraded.cancel();
            std::future::pending::<()>().await;
        };
        let ended = async {
            tokio::select! {
                () = tasks.wait() => {}
                () = cut_upgraded => {}
            }
        };
        if tokio::time::timeout(bound, ended).await.is_err() {
            warn!(connections = tasks.len(), "connections cut off");
        }
    }
}

/// Runs the activator until `shutdown`. Then it lingers until no clients are routed here, and drains requests in
/// flight.
pub async fn run(
    mut config: ActivatorConfig,
    shutdown: CancellationToken,
) -> Result<(), ActivatorError> {
    config.validate()?;
    // Bad files and a port that is taken have to be errors before the controller learns of this activator.
    let certificate_files = config.certificate_files();
    let file_certificates = certificate_files.read()?;
    let gateways = bind_gateways(&mut config)?;
    let mut registry = Registry::default();
    let stop_listeners = CancellationToken::new();
    let activator = ActivatorInstance::new(&config, &mut registry, &stop_listeners);
    warn_of_unused_files(&certificate_files, &gateways);
    activator.follow_certificate_files(certificate_files, file_certificates, &stop_listeners);
    activator.serve_gateways(gateways, &stop_listeners);
    // Routes and reports continue after the signal: waiting requests still need their pod while the activator drains.
    let stop_links = CancellationToken::new();
    let links = Arc::new(ControlPlaneLinks::new(&config, &stop_links));
    let not_ready_reasons = not_ready_reasons(&activator, &links, &shutdown);
    let admin = AdminState::always_healthy(registry, not_ready_reasons);
    let debug_pages = activator.debug_pages();
    let pages = common::admin::serve(config.admin, admin, debug_pages, stop_links.clone());
    let follow = route_stream::watch_routes(
        &links.routes,
        &links.reports,
        &activator.reports,
        &activator.forwarder,
        &activator.ports,
        &activator.gateway_ports,
        &links.routes_received,
    );
    let peers = PeerStreams::new(
        Arc::clone(&activator.forwarder.routes),
        activator.forwarder.metrics.disconnected_peers.clone(),
        links.subscriber.clone(),
        links.credentials.clone(),
        stop_links.clone(),
    );
    let end = async {
        shutdown.cancelled().await;
        activator.linger(&config).await;
        stop_listeners.cancel();
        // Slots are announced as free only after the last request, and the log is written last, since each request adds
        // to it.
        activator.drain(&config).await;
        peers.announce_shutdown().await;
        let forwarder = &activator.forwarder;
        tokio::join!(
            forwarder.request_log.flush(LOG_FLUSH_TIMEOUT),
            forwarder.telemetry.flush(LOG_FLUSH_TIMEOUT),
        );
    };
    info!(name = %config.name(), controller = %config.controller, "activator started");
    tokio::select! {
        served = pages => served.map_err(ActivatorError::from),
        served = peers.run() => served.map_err(ActivatorError::from),
        () = follow => Ok(()),
        () = activator.usage_reporter.run(&links.usage) => Ok(()),
        () = activator.run_housekeeping() => Ok(()),
        () = end => {
            stop_links.cancel();
            info!(name = %config.name(), "activator stopped");
            Ok(())
        }
    }
}

/// Streams to the controller and the autoscaler.
#[derive(Debug)]
struct ControlPlaneLinks {
    routes: ComponentLink,
    reports: ComponentLink,
    usage: ComponentLink,
    routes_received: RoutesReceivedFlag,
    subscriber: ComponentReplica,
    credentials: Option<Arc<TlsCredentials>>,
}

impl ControlPlaneLinks {
    fn new(config: &ActivatorConfig, stop: &CancellationToken) -> Self {
        let subscriber = ComponentReplica {
            role: ClientComponent::Activator,
            name: config.name().to_owned(),
            node: config.node.clone(),
        };
        let credentials = config.identity.as_ref().map(|_| TlsCredentials::new());
        let controllers = ReplicaResolver::with_credentials(
            Component::Controller,
            &config.controller,
            credentials.as_ref(),
        );
        let autoscalers = ReplicaResolver::with_credentials(
            Component::Autoscaler,
            &config.autoscaler,
            credentials.as_ref(),
        );
        if let (Some(credentials), Some(folder)) = (credentials.clone(), &config.identity) {
            let controllers = Arc::clone(&controllers);
            let files = enrollment::EnrollmentFiles::in_folder(folder);
            tokio::spawn(enrollment::keep_enrolled(credentials, controllers, files, stop.clone()));
        }
        let link = |to: &Arc<ReplicaResolver>| {
            ComponentLink::with_resolver(Arc::clone(to), subscriber.clone(), stop.clone())
        };
        // The stream of routes also lists the replicas of both components, which the resolvers follow.
        let routes = link(&controllers)
            .with_listed_replicas(wire::ServerComponent::Controller, Arc::clone(&controllers));
        Self {
            routes: routes
                .with_listed_replicas(wire::ServerComponent::Autoscaler, Arc::clone(&autoscalers)),
            reports: link(&controllers),
            usage: link(&autoscalers),
            routes_received: RoutesReceivedFlag::default(),
            credentials,
            subscriber,
        }
    }
}

/// Returns the function by which `/readyz` finds the reasons. It is called for each request of that page.
fn not_ready_reasons(
    activator: &ActivatorInstance,
    links: &Arc<ControlPlaneLinks>,
    shutdown: &CancellationToken,
) -> Box<dyn Fn() -> Vec<String> + Send + Sync> {
    let (ports, links, shutdown) =
        (Arc::clone(&activator.ports), Arc::clone(links), shutdown.clone());
    Box::new(move || {
        let mut all = ports.not_ready_reasons();
        // All reasons are listed, since an operator mends them one by one.
        let mut add = |wrong: bool, text: &str| {
            if wrong {
                all.push(text.to_owned());
            }
        };
        add(
            !links.routes_received.load(Ordering::Relaxed),
            "no routes received from the controller yet",
        );
        add(
            !links.usage.is_connected(),
            "no stream to the autoscaler: waiting requests are not reported",
        );
        add(shutdown.is_cancelled(), "shutting down");
        all
    })
}

/// Registers the metrics by Revision and host, and their gauges for collectors.
fn register_request_metrics(forwarder: &RequestForwarder, registry: &mut Registry) {
    let routes = Arc::clone(&forwarder.routes);
    registry.register_collector(Box::new(RevisionQueueCollector(Arc::clone(&routes))));
    let recorder = Arc::clone(&forwarder.telemetry);
    registry.register_collector(Box::new(RequestMetricsCollector(recorder)));
    let gauges = move || {
        let all = routes.revisions();
        let metrics = all.iter().map(|it| (&it.name, it.queue_metrics()));
        // Revisions without requests have no gauge, as at `/metrics`.
        let active = metrics.filter(|(_, it)| *it != RevisionQueueMetrics::default());
        let gauges = active.map(|(name, it)| RevisionGauges {
            namespace: name.namespace.to_string(),
            revision: name.name.to_string(),
            queued: i64::try_from(it.waiting).unwrap_or(i64::MAX),
            active: i64::try_from(it.at_pods).unwrap_or(i64::MAX),
        });
        gauges.collect::<Vec<_>>()
    };
    forwarder.telemetry.set_gauges(Box::new(gauges));
}

/// Number of file descriptors that this process may open.
fn open_file_limit() -> u64 {
    // An error means an unknown resource, which this one is not.
    getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _hard)| soft)
}

/// Listener of a gateway.
#[derive(Debug)]
struct GatewayListener {
    listener: TcpListener,
    entrypoint: Entrypoint,
    transport: ClientTransport,
}

/// Listeners of the gateways, bound before anything else starts.
fn bind_gateways(config: &mut ActivatorConfig) -> Result<Vec<GatewayListener>, ActivatorError> {
    let failed = |address: String| move |source| ActivatorError::Gateway { address, source };
    let given = [
        (config.outside_listener.take(), &mut config.outside, ClientTransport::Plain),
        (config.outside_tls_listener.take(), &mut config.outside_tls, ClientTransport::Tls),
    ];
    let mut listeners = Vec::new();
    for (listener, address, transport) in given {
        let Some(listener) = listener else { continue };
        // The given listener takes the place of the one at this address.
        *address = None;
        let listener = adopt_listener(listener).map_err(failed("a given socket".to_owned()))?;
        listeners.push(GatewayListener { listener, entrypoint: Entrypoint::External, transport });
    }
    for listener in std::mem::take(&mut config.gateway_port_listeners) {
        let adopted = adopt_listener(listener)
            .and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        let (port, listener) = adopted.map_err(failed("a given socket".to_owned()))?;
        let (entrypoint, transport) = (Entrypoint::GatewayPort(port), ClientTransport::Plain);
        listeners.push(GatewayListener { listener, entrypoint, transport });
    }
    for GatewayAddress { address, entrypoint, transport } in config.gateway_addresses() {
        let listener = tcp_socket::bind_listener(address).map_err(failed(address.to_string()))?;
        listeners.push(GatewayListener { listener, entrypoint, transport });
    }
    Ok(listeners)
}

/// Makes a given listener one of the runtime.
fn adopt_listener(listener: std::net::TcpListener) -> io::Result<TcpListener> {
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

impl ActivatorConfig {
    /// Files with certificates of the TLS gateway.
    // Here, because `config` is in a lower layer than `tls`.
    pub fn certificate_files(&self) -> CertificateFiles {
        let pair = self.tls_cert.clone().zip(self.tls_key.clone());
        CertificateFiles { pair, folder: self.tls_folder.clone() }
    }
}

/// Warns of certificate files that have no effect, since no gateway has TLS.
fn warn_of_unused_files(files: &CertificateFiles, gateways: &[GatewayListener]) {
    let has_tls = gateways.iter().any(|it| it.transport == ClientTransport::Tls);
    if !files.is_empty() && !has_tls {
        warn!("certificate files have no effect without a gateway of TLS");
    }
}
