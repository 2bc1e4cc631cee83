//! Shell: `rouse up`: the local node with all its components in this process, or one of them.

use std::{
    io::{ErrorKind, Write as _},
    net::{SocketAddr, TcpListener},
    num::{NonZero, NonZeroU16},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use activator::tls::certificate_files::CertificateFiles;
use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use common::{
    local_node::LocalNodeSpec,
    wire::{HstsPolicy, TlsCipher, TlsMinVersion, TlsSettings},
};
use controller::model::{
    config_maps::port_ranges::parse_gateway_port, standby_policy::parse_agent_timeout,
};
use ipnet::IpNet;
use local::{
    cgroups::CgroupMounts,
    layout::{self, NodeLayout},
    net,
    node::NodeManager,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tracing::info;

/// Capacity of the channel of pod statuses to the controller; more than a node has pods that change at once.
const STATUS_CHANNEL_CAPACITY: usize = 1024;
/// Milliseconds between two evaluations of load: Knative's `tick-interval`.
const TICK_MS: u64 = 2000;
/// Interval of readiness checks of a component.
const READY_POLL: Duration = Duration::from_millis(10);

/// Command-line options of `rouse up`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct NodeUpArgs {
    /// Folder of OCI image layouts, found by the names in their index
    #[arg(long, value_name = "DIR")]
    images: Option<PathBuf>,
    /// Address on which the gateway listens for requests from outside the node
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    gateway: SocketAddr,
    /// Ports for services of raw TCP (rouse.dev/port), at the address of the gateway; open from the start. With --part,
    /// controller and activator need the same ones
    #[arg(long, value_name = "PORT", num_args = 1.., value_delimiter = ',', value_parser = parse_gateway_port)]
    gateway_ports: Vec<NonZeroU16>,
    /// Networks of the proxies before the gateway whose X-Forwarded-* and Forwarded are trusted, besides those of
    /// config-network
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',', value_parser = crate::install::network)]
    trusted_proxies: Vec<IpNet>,
    /// Expect a PROXY protocol header, version 1 or 2, on each connection from the trusted proxies
    #[arg(long, requires = "trusted_proxies")]
    proxy_protocol: bool,
    /// Certificate of the gateway in PEM, followed by its intermediates; also served to clients that name no known
    /// host. A renewed file is read again
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert in PEM, without a passphrase
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Folder of certificates, chosen by the hosts that they name: NAME.crt with NAME.key, or subfolders with tls.crt
    /// and tls.key, or fullchain.pem and privkey.pem
    #[arg(long, value_name = "DIR")]
    tls_folder: Option<PathBuf>,
    /// Address on which the gateway listens for TLS, if --tls-cert or --tls-folder is given; redirects to https name its
    /// port. With --part, only the activator uses the --tls options
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8443")]
    tls_gateway: SocketAddr,
    /// Lowest version of TLS that the gateway accepts, 1.2 or 1.3
    #[arg(long, value_name = "VERSION", default_value = "1.2", value_parser = TlsMinVersion::parse)]
    tls_min_version: TlsMinVersion,
    /// Ciphers that the gateway accepts with TLS, by their IANA names; all that it supports if there are none
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',', value_parser = TlsCipher::parse)]
    tls_ciphers: Vec<TlsCipher>,
    /// Refuse clients of TLS that name no host, or one without a certificate, instead of presenting the default
    /// certificate
    #[arg(long)]
    tls_strict_sni: bool,
    /// Strict-Transport-Security of responses over TLS, where the pod sends none: "max-age=31536000; includeSubDomains"
    #[arg(long, value_name = "POLICY", value_parser = HstsPolicy::parse)]
    hsts: Option<HstsPolicy>,
    /// Time without a sign of the agent after which its frozen pods are passed over, from 10ms to 60s; choose a longer
    /// one on a busy machine. With --part, only the controller uses it
    #[arg(long, value_name = "DURATION", default_value = "250ms", value_parser = parse_agent_timeout)]
    standby_agent_timeout: Duration,
    /// Run only this component; `rouse up` once for each makes a node whose components can be restarted one by one
    #[arg(long = "part", value_enum)]
    component: Option<NodeComponent>,
    /// Write this file once all components are ready
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
}

impl NodeUpArgs {
    /// Certificate files of the gateway, by absolute paths. An error means that a path is empty, or that this process
    /// has no current folder.
    fn certificate_files(&self) -> Result<CertificateFiles> {
        let absolute = |path: &Path| {
            std::path::absolute(path)
                .with_context(|| format!("cannot make the path {path:?} absolute"))
        };
        let pair = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => Some((absolute(certificate)?, absolute(key)?)),
            // The command line requires both or none.
            _ => None,
        };
        let folder = self.tls_folder.as_deref().map(absolute).transpose()?;
        Ok(CertificateFiles { pair, folder })
    }

    /// Checks that the versions of TLS have a cipher.
    fn check_tls(&self) -> Result<()> {
        let ciphers = self.tls_ciphers.clone();
        let settings = TlsSettings { min_version: self.tls_min_version, ciphers };
        settings.check().map_err(|fault| anyhow::anyhow!("--tls-ciphers has {fault}"))
    }
}

/// Value of `--part`: the component of the node that this process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum NodeComponent {
    /// Objects, routes and the pods themselves
    Controller,
    /// Number of pods, from the load
    Autoscaler,
    /// Requests that wait for a pod, and the gateway
    Activator,
    /// eBPF programs and maps in the kernel
    Agent,
}

impl NodeComponent {
    /// All components in the order in which they depend on each other.
    const ALL: [Self; 4] = [Self::Controller, Self::Autoscaler, Self::Activator, Self::Agent];

    fn name(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Autoscaler => "autoscaler",
            Self::Activator => "activator",
            Self::Agent => "agent",
        }
    }

    /// Address of health and metrics of the component, inside the node's network namespace.
    fn admin_address(self) -> SocketAddr {
        let port = match self {
            Self::Controller => 7101,
            Self::Autoscaler => 7102,
            Self::Activator => 7103,
            Self::Agent => 7104,
        };
        SocketAddr::from(([127, 0, 0, 1], port))
    }
}

/// Runs the node until SIGINT or SIGTERM, then removes it. A single component leaves the rest of the node alone.
pub(crate) fn run(layout: &NodeLayout, args: &NodeUpArgs) -> Result<()> {
    require_root()?;
    let components =
        args.component.map_or_else(|| NodeComponent::ALL.to_vec(), |component| vec![component]);
    // Components may be started at the same moment; the lock orders their creation of the node.
    let lock = NodeManager::lock(layout)?;
    // Before the node is made: a port that is taken must not end the pods that a killed node has left.
    let host_handles = match prepare_run(layout, args, &components) {
        Ok(host_handles) => host_handles,
        Err(error) => {
            NodeManager::discard_lock(layout, lock);
            return Err(error);
        }
    };
    let result = create_node(layout, args.component);
    drop(lock);
    let result = result.and_then(|()| enter_and_run(layout, args, host_handles, &components));
    if args.component.is_some() {
        return result;
    }
    let removal = NodeManager::destroy(layout)
        .context("the node is left half removed; `rouse down` tries again");
    join_errors(result, removal)
}

/// Checks that the components may run, and opens what they need of the host. It changes nothing of the node.
fn prepare_run(
    layout: &NodeLayout,
    args: &NodeUpArgs,
    components: &[NodeComponent],
) -> Result<HostHandles> {
    check_not_running(layout, args.component)?;
    remove_ready_file(args.ready_file.as_deref())?;
    HostHandles::open(args, components)
}

/// Removes the ready file of an earlier run, which would show a node as ready that is not. A pipe, a device or a link
/// stays, since no run has made it: `/dev/stdout` is a link.
fn remove_ready_file(file: Option<&Path>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    if std::fs::symlink_metadata(file).is_ok_and(|it| !it.is_file()) {
        return Ok(());
    }
    match std::fs::remove_file(file) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.with_context(|| format!("cannot remove {}", file.display())),
    }
}

/// Returns the errors of both the run of a node and its removal.
fn join_errors(run: Result<()>, removal: Result<()>) -> Result<()> {
    match (run, removal) {
        (Err(run), Err(removal)) => bail!("{run:#}; {removal:#}"),
        (run, removal) => run.and(removal),
    }
}

/// Returns an error if this process has no root rights.
pub(crate) fn require_root() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("a node needs root: it makes network namespaces, cgroups and BPF programs; try sudo");
    }
    Ok(())
}

/// Creates the missing pieces of the node, and registers this process as the whole node or as one component.
fn create_node(layout: &NodeLayout, component: Option<NodeComponent>) -> Result<()> {
    NodeManager::create(layout)?;
    Ok(NodeManager::register_component(layout, component.map_or("node", NodeComponent::name))?)
}

/// Returns an error if a requested component, or the whole node, runs already.
fn check_not_running(layout: &NodeLayout, component: Option<NodeComponent>) -> Result<()> {
    // Components of one node may run in several processes, but the whole node excludes all of them.
    let others = NodeManager::running_components(layout);
    let clashes = |name: &str| match component {
        Some(component) => name == component.name() || name == "node",
        None => true,
    };
    if let Some((name, process)) = others.iter().find(|(name, _)| clashes(name)) {
        let (node, pid) = (layout.name(), process.pid);
        let prefix = if name == "node" { String::new() } else { format!("{name} of ") };
        bail!("{prefix}node {node} runs already (pid {pid}); `rouse --node {node} down` ends it");
    }
    Ok(())
}

fn enter_and_run(
    layout: &NodeLayout,
    args: &NodeUpArgs,
    host_handles: HostHandles,
    components: &[NodeComponent],
) -> Result<()> {
    // Before the runtime exists: only this thread changes its namespace, and later threads inherit it.
    NodeManager::enter(layout)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let running = RunningComponents::start(layout, args, host_handles, components)?;
        running.run_until_stopped(layout, args.ready_file.as_deref()).await
    })
}

/// Binds the listener of a gateway. `name` and `option` are its name and its option in the error.
fn bind_gateway(name: &str, option: &str, address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).with_context(|| {
        format!("the {name} cannot listen on {address}; choose another with {option}")
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Handles that must be opened before the node's namespace is entered. The component that needs one takes it.
struct HostHandles {
    host_namespace: Option<OwnedFd>,
    gateway: Option<TcpListener>,
    /// Listener for TLS, if certificate files are given.
    tls_gateway: Option<TcpListener>,
    /// Listeners of gateway ports.
    gateway_ports: Vec<TcpListener>,
    /// Certificate files that the activator follows.
    certificate_files: CertificateFiles,
}

impl HostHandles {
    /// Opens the handles that these components need, in the host's network. Certificate files that cannot be used are
    /// an error.
    fn open(args: &NodeUpArgs, components: &[NodeComponent]) -> Result<Self> {
        let mut handles = Self {
            host_namespace: Some(net::current_namespace()?),
            gateway: None,
            tls_gateway: None,
            gateway_ports: Vec::new(),
            certificate_files: CertificateFiles::default(),
        };
        if components.contains(&NodeComponent::Activator) {
            handles.open_gateways(args)?;
        }
        Ok(handles)
    }

    fn open_gateways(&mut self, args: &NodeUpArgs) -> Result<()> {
        args.check_tls()?;
        self.certificate_files = args.certificate_files()?;
        // The activator reads them itself. Here, an error comes before the node is made.
        self.certificate_files.read()?;
        self.gateway = Some(bind_gateway("gateway", "--gateway", args.gateway)?);
        if !self.certificate_files.is_empty() {
            let listener = bind_gateway("TLS gateway", "--tls-gateway", args.tls_gateway)?;
            self.tls_gateway = Some(listener);
        }
        for port in &args.gateway_ports {
            let address = SocketAddr::new(args.gateway.ip(), port.get());
            let listener = bind_gateway("gateway for raw TCP", "--gateway-ports", address)?;
            self.gateway_ports.push(listener);
        }
        Ok(())
    }

    /// Port of the TLS gateway, which redirects to https name; `None` without one.
    fn https_port(&self) -> Option<NonZeroU16> {
        // The listener's own port: that of the option may be 0, for any free one.
        let address = self.tls_gateway.as_ref()?.local_addr().ok()?;
        NonZeroU16::new(address.port())
    }
}

/// Components that run in this process.
struct RunningComponents {
    components: Vec<NodeComponent>,
    tasks: JoinSet<(&'static str, Result<()>)>,
    shutdown: CancellationToken,
}

impl RunningComponents {
    /// Starts these components as tasks, in the given order.
    fn start(
        layout: &NodeLayout,
        args: &NodeUpArgs,
        mut host_handles: HostHandles,
        components: &[NodeComponent],
    ) -> Result<Self> {
        let mut running = Self {
            components: components.to_vec(),
            tasks: JoinSet::new(),
            shutdown: CancellationToken::new(),
        };
        for component in components {
            match component {
                NodeComponent::Controller => {
                    running.start_controller(layout, args, &mut host_handles)?
                }
                NodeComponent::Autoscaler => running.start_autoscaler(layout),
                NodeComponent::Activator => {
                    running.start_activator(layout, args, &mut host_handles)
                }
                NodeComponent::Agent => running.start_agent(layout)?,
            }
        }
        Ok(running)
    }

    /// Starts the controller and, since it alone decides which pods run, the node's pods and DNS names.
    fn start_controller(
        &mut self,
        layout: &NodeLayout,
        args: &NodeUpArgs,
        host_handles: &mut HostHandles,
    ) -> Result<()> {
        // Only the latest node spec matters, so a watch channel may skip older ones; each status counts.
        let (node_spec_tx, node_spec_rx) = watch::channel(LocalNodeSpec::default());
        let (statuses_tx, statuses_rx) = mpsc::channel(STATUS_CHANNEL_CAPACITY);
        let config = controller_config(layout, args);
        let node = controller::shell::local_node::LocalNodeChannels {
            node_spec: node_spec_tx,
            statuses: statuses_rx,
        };
        let shutdown = self.shutdown.clone();
        self.spawn_component("controller", async {
            Ok(controller::run(config, node, shutdown).await?)
        });

        // The node connects its bridge to the host's network, which this process has left.
        let host = host_handles.host_namespace.take().context("the controller is started twice")?;
        let config = local::LocalNodeConfig {
            layout: layout.clone(),
            images: args.images.clone(),
            runtime: None,
            host_network: Arc::new(host),
            credentials: local::images::credential_files(&std::env::vars().collect()),
        };
        let shutdown = self.shutdown.clone();
        self.spawn_component("pods", async {
            Ok(local::run(config, node_spec_rx, statuses_tx, shutdown).await?)
        });
        Ok(())
    }

    fn start_autoscaler(&mut self, layout: &NodeLayout) {
        let config = autoscaler::AutoscalerConfig {
            usage: unix_endpoint(&layout.autoscaler_socket()),
            controller: unix_endpoint(&layout.controller_socket()),
            admin: NodeComponent::Autoscaler.admin_address(),
            name: layout.name().to_owned(),
            tick_ms: TICK_MS,
            identity: None,
        };
        let shutdown = self.shutdown.clone();
        self.spawn_component("autoscaler", async { Ok(autoscaler::run(config, shutdown).await?) });
    }

    /// Starts the activator with the listeners that were opened on the host.
    fn start_activator(
        &mut self,
        layout: &NodeLayout,
        args: &NodeUpArgs,
        host_handles: &mut HostHandles,
    ) {
        let defaults = activator::ActivatorConfig::defaults();
        // Without a TLS gateway, redirects lead to a proxy before this one, at the default port.
        let https_port = host_handles.https_port().unwrap_or(defaults.https_port);
        let CertificateFiles { pair, folder } = std::mem::take(&mut host_handles.certificate_files);
        let (tls_cert, tls_key) = pair.unzip();
        let config = activator::ActivatorConfig {
            name: layout.name().to_owned(),
            node: layout.name().to_owned(),
            controller: unix_endpoint(&layout.controller_socket()),
            autoscaler: unix_endpoint(&layout.autoscaler_socket()),
            listen: vec![layout::GATEWAY_V4.into(), layout::GATEWAY_V6.into()],
            ports_map: Some(agent::kernel::programs::ports_map(&layout.bpf())),
            outside_listener: host_handles.gateway.take(),
            outside_tls_listener: host_handles.tls_gateway.take(),
            gateway_port_listeners: std::mem::take(&mut host_handles.gateway_ports),
            tls_cert,
            tls_key,
            tls_folder: folder,
            https_port,
            tls_min_version: args.tls_min_version,
            tls_ciphers: args.tls_ciphers.clone(),
            tls_strict_sni: args.tls_strict_sni,
            hsts: args.hsts.clone(),
            trusted_proxies: args.trusted_proxies.clone(),
            proxy_protocol: args.proxy_protocol,
            admin: NodeComponent::Activator.admin_address(),
            ..defaults
        };
        let shutdown = self.shutdown.clone();
        self.spawn_component("activator", async { Ok(activator::run(config, shutdown).await?) });
    }

    /// Starts the agent of the node, which redirects the connects of all its processes.
    fn start_agent(&mut self, layout: &NodeLayout) -> Result<()> {
        let cgroups = CgroupMounts::find()?;
        let config = agent::config::AgentConfig {
            node: layout.name().to_owned(),
            controller: unix_endpoint(&layout.controller_socket()),
            autoscaler: unix_endpoint(&layout.autoscaler_socket()),
            identity: None,
            pins: Some(layout.bpf()),
            // The whole node: the connects of pods and of `rouse run` are redirected.
            clients_cgroup: Some(layout.cgroup(&cgroups.v2)),
            pods_cgroup: Some(layout.pods_cgroup(&cgroups.v2)),
            kubelet_cgroup: None,
            // No API server runs here.
            clusterip: agent::config::ClusterIpMode::Off,
            // The activator's setting `ports_map` is for maps of the default sizes.
            map_sizes: agent::map_sizes::MapSizeOverrides::default(),
            apiservers: Vec::new(),
            kubelet_kubeconfig: None,
            state: None,
            without_kube_proxy: false,
            service_cidr: Vec::new(),
            wait_for_drain: true,
            tunnel_drain_ms: 60_000,
            namespaces: Some(layout.namespaces()),
            activator_netns: Some(layout.node_namespace()),
            // Controller and activator run in this process, so no report is ahead of the table.
            activator_peer_port: None,
            admin: NodeComponent::Agent.admin_address(),
        };
        let shutdown = self.shutdown.clone();
        self.spawn_component("agent", async { Ok(agent::run(config, shutdown).await?) });
        Ok(())
    }

    fn spawn_component(
        &mut self,
        name: &'static str,
        component: impl Future<Output = Result<()>> + Send + 'static,
    ) {
        self.tasks.spawn(async move { (name, run_on_own_threads(name, component).await) });
    }

    /// Waits for a signal or for the end of a component, then stops all components.
    async fn run_until_stopped(
        mut self,
        layout: &NodeLayout,
        ready_file: Option<&Path>,
    ) -> Result<()> {
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let announce =
            announce_ready(layout.name().to_owned(), self.components.clone(), ready_file);
        tokio::pin!(announce);
        // A component that ends before the node is ready must stop the wait, so both are polled together.
        let mut announced = false;
        let ended = loop {
            tokio::select! {
                ended = self.tasks.join_next() => break ended.map(task_result),
                _ = interrupt.recv() => break None,
                _ = terminate.recv() => break None,
                ready = &mut announce, if !announced => match ready {
                    Ok(()) => announced = true,
                    // The components end in order all the same.
                    Err(error) => break Some(Err(error)),
                },
            }
        };
        info!(node = layout.name(), "node stops");
        self.shutdown.cancel();
        // The first error is kept: later ones are usually its consequence.
        let mut result = ended.unwrap_or_else(|| Ok(()));
        while let Some(ended) = self.tasks.join_next().await {
            result = result.and_then(|()| task_result(ended));
        }
        result
    }
}

/// Options of the node's controller.
fn controller_config(layout: &NodeLayout, args: &NodeUpArgs) -> controller::ControllerConfig {
    controller::ControllerConfig {
        node: layout.name().to_owned(),
        state: layout.data_folder(),
        listen: unix_endpoint(&layout.controller_socket()),
        admin: NodeComponent::Controller.admin_address(),
        gateway_ports: args.gateway_ports.clone(),
        standby_agent_timeout: args.standby_agent_timeout,
        ..controller::ControllerConfig::default()
    }
}

/// Runs a component on threads of its own, as in a process of its own. On shared threads a waiting request would be
/// delayed by the work of other components.
async fn run_on_own_threads(
    name: &'static str,
    component: impl Future<Output = Result<()>> + Send + 'static,
) -> Result<()> {
    let mut builder = match name {
        "activator" => traffic_runtime(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().thread_name(name).build()?;
    let (end_tx, end_rx) = oneshot::channel();
    let body = move || {
        // Spawned, because tasks would otherwise move between the runtime's workers and this thread.
        let result = runtime.block_on(runtime.spawn(component)).context("the component panicked");
        // The receiver is gone only when the whole process ends.
        let _ = end_tx.send(result.flatten());
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(body)?;
    end_rx.await.context("the component panicked")?
}

/// Runtime with half of the processors; pods need the others. A thread that is woken when no processor is free only
/// displaces the thread that woke it, which still has the request in hand.
fn traffic_runtime() -> tokio::runtime::Builder {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    match processors / 2 {
        0 | 1 => tokio::runtime::Builder::new_current_thread(),
        worker_count => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(worker_count);
            builder
        }
    }
}

/// Adds the component's name to the error with which it ended.
fn task_result(ended: Result<(&'static str, Result<()>), tokio::task::JoinError>) -> Result<()> {
    let (name, result) = ended.context("a component of the node panicked")?;
    result.with_context(|| format!("the {name} of the node failed"))
}

fn unix_endpoint(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}

/// Waits until all components are ready. Then prints that, and writes the ready file.
async fn announce_ready(
    node: String,
    components: Vec<NodeComponent>,
    ready_file: Option<&Path>,
) -> Result<()> {
    for component in components {
        while !is_component_ready(component.admin_address()).await {
            tokio::time::sleep(READY_POLL).await;
        }
    }
    if let Some(file) = ready_file {
        std::fs::write(file, "ready\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    // The node needs no reader: its terminal or pipe may be closed.
    let _ = writeln!(std::io::stdout(), "node {node} is ready");
    Ok(())
}

/// Requests `/readyz` over TCP like any client; any error means not ready.
async fn is_component_ready(admin: SocketAddr) -> bool {
    let request = async {
        let mut stream = TcpStream::connect(admin).await?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .await?;
        let mut response = [0; 12];
        stream.read_exact(&mut response).await?;
        std::io::Result::Ok(response.ends_with(b" 200"))
    };
    request.await.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn the_ready_file_of_an_earlier_run_is_removed() {
        let file = std::env::temp_dir().join(format!("rouse-ready-{}", std::process::id()));
        std::fs::write(&file, "ready\n").unwrap();
        remove_ready_file(Some(&file)).unwrap();
        assert!(!file.exists());
        remove_ready_file(Some(&file)).unwrap();
        let error = remove_ready_file(Some(Path::new("/proc/version"))).unwrap_err();
        assert_eq!(error.to_string(), "cannot remove /proc/version");
    }

    #[test]
    fn a_ready_file_that_no_run_has_made_stays() {
        let folder = std::env::temp_dir().join(format!("rouse-ready-link-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let link = folder.join("stdout");
        std::os::unix::fs::symlink("/proc/self/fd/1", &link).unwrap();
        remove_ready_file(Some(&link)).unwrap();
        assert!(link.symlink_metadata().is_ok());
        remove_ready_file(Some(&folder)).unwrap();
        assert!(folder.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[derive(clap::Parser)]
    struct UpTestCommand {
        #[command(flatten)]
        up: NodeUpArgs,
    }

    #[test]
    fn policies_of_tls_are_checked_before_the_node_is_made() {
        let parse = |args: &[&str]| {
            <UpTestCommand as clap::Parser>::try_parse_from([&["up"], args].concat())
                .map(|it| it.up)
        };
        for bad in [
            ["--tls-min-version", "1.1"],
            ["--tls-ciphers", "TLS_AES_128_GCM_SHA256,RC4"],
            ["--hsts", "includeSubDomains"],
        ] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
        let old = ["--tls-min-version=1.3", "--tls-ciphers=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"];
        let error = parse(&old).unwrap().check_tls().unwrap_err();
        let expected = "--tls-ciphers has no cipher of TLS 1.3, the only version that is accepted";
        assert_eq!(error.to_string(), expected);
        let good =
            ["--tls-min-version=1.3", "--tls-ciphers=TLS_AES_128_GCM_SHA256", "--hsts=max-age=1"];
        assert!(parse(&good).unwrap().check_tls().is_ok());
    }

    #[test]
    fn a_failed_removal_does_not_hide_why_the_node_ended() {
        let run = || Err(anyhow!("no port").context("no gateway"));
        let removal = || Err(anyhow!("busy").context("half removed"));
        let text = |result: Result<()>| result.err().map(|error| format!("{error:#}"));
        assert_eq!(text(join_errors(Ok(()), Ok(()))), None);
        assert_eq!(text(join_errors(run(), Ok(()))).as_deref(), Some("no gateway: no port"));
        assert_eq!(text(join_errors(Ok(()), removal())).as_deref(), Some("half removed: busy"));
        let both = text(join_errors(run(), removal()));
        assert_eq!(both.as_deref(), Some("no gateway: no port; half removed: busy"));
    }

    /// Options of `rouse up` with these arguments.
    fn parse_options(args: &[&str]) -> Result<NodeUpArgs, clap::Error> {
        #[derive(clap::Parser)]
        struct UpCommand {
            #[command(flatten)]
            options: NodeUpArgs,
        }
        let words = std::iter::once(&"up").chain(args);
        <UpCommand as clap::Parser>::try_parse_from(words).map(|it| it.options)
    }

    /// Makes a folder of one test, and returns its path.
    fn make_folder(name: &str) -> String {
        let folder = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder.to_str().unwrap().to_owned()
    }

    #[test]
    fn certificate_and_key_are_given_together() {
        for option in ["--tls-cert", "--tls-key"] {
            let error = parse_options(&[option, "pair.pem"]).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::MissingRequiredArgument, "{option}");
        }
        let args =
            ["--tls-cert", "pair.crt", "--tls-key", "/keys/pair.key", "--tls-folder", "more"];
        let files = parse_options(&args).unwrap().certificate_files().unwrap();
        let here = std::env::current_dir().unwrap();
        assert_eq!(files.pair, Some((here.join("pair.crt"), PathBuf::from("/keys/pair.key"))));
        assert_eq!(files.folder, Some(here.join("more")));
        assert!(parse_options(&[]).unwrap().certificate_files().unwrap().is_empty());
    }

    #[test]
    fn the_tls_gateway_listens_only_with_certificate_files() {
        let folder = make_folder("rouse-tls-listens");
        let ports = ["--gateway", "127.0.0.1:0", "--tls-gateway", "127.0.0.1:0"];
        let with_folder = [&ports[..], &["--tls-folder", &folder]].concat();
        let open = |args: &[&str], component| {
            HostHandles::open(&parse_options(args).unwrap(), &[component]).unwrap()
        };
        let plain = open(&ports, NodeComponent::Activator);
        assert!(plain.gateway.is_some() && plain.tls_gateway.is_none());
        assert_eq!(plain.https_port(), None);
        let tls = open(&with_folder, NodeComponent::Activator);
        let port = tls.tls_gateway.as_ref().unwrap().local_addr().unwrap().port();
        assert_eq!(tls.https_port().map(NonZeroU16::get), Some(port));
        let other = open(&with_folder, NodeComponent::Agent);
        assert!(other.gateway.is_none() && other.tls_gateway.is_none());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn gateway_ports_are_bound_at_the_address_of_the_gateway() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port().to_string();
        let args = ["--gateway", "127.0.0.1:0", "--gateway-ports", &port];
        let open = |component| HostHandles::open(&parse_options(&args).unwrap(), &[component]);
        let text = format!(
            "the gateway for raw TCP cannot listen on 127.0.0.1:{port}; choose another with --gateway-ports"
        );
        let refused = open(NodeComponent::Activator).err().map(|error| error.to_string());
        assert_eq!(refused, Some(text));
        drop(taken);
        let handles = open(NodeComponent::Activator).unwrap();
        let [listener] = &handles.gateway_ports[..] else { panic!("one listener") };
        assert_eq!(listener.local_addr().unwrap().to_string(), format!("127.0.0.1:{port}"));
        assert!(open(NodeComponent::Controller).unwrap().gateway_ports.is_empty());
    }

    /// Connections to this port would all be reset, because no service may have such a port.
    #[test]
    fn a_gateway_port_that_no_service_may_have_is_refused() {
        let refused = parse_options(&["--gateway-ports", "5432,20017"]).unwrap_err().to_string();
        let text = "invalid value '20017' for '--gateway-ports <PORT>...': it is one of the activators' own ports";
        assert!(refused.contains(text), "{refused}");
    }

    #[test]
    fn the_timeout_of_standby_reaches_the_controller() {
        let layout = NodeLayout::new("timeout").unwrap();
        let timeout = |args: &[&str]| {
            let options = parse_options(args).unwrap();
            controller_config(&layout, &options).standby_agent_timeout
        };
        let default = controller::ControllerConfig::default().standby_agent_timeout;
        assert_eq!(timeout(&[]), default);
        assert_eq!(timeout(&["--standby-agent-timeout", "30s"]), Duration::from_secs(30));
    }

    #[test]
    fn a_timeout_of_standby_is_refused_as_in_config_autoscaler() {
        for (text, error) in [
            ("5ms", "standby-agent-timeout = 5ms, must be in [10ms; 1m0s] range"),
            ("2m", "standby-agent-timeout = 2m0s, must be in [10ms; 1m0s] range"),
            ("soon", "time: invalid duration \"soon\""),
        ] {
            let refused = parse_options(&["--standby-agent-timeout", text]).unwrap_err();
            let message =
                format!("invalid value '{text}' for '--standby-agent-timeout <DURATION>': {error}");
            assert!(refused.to_string().contains(&message), "{refused}");
        }
    }

    #[test]
    fn a_taken_port_names_the_option() {
        let folder = make_folder("rouse-tls-taken");
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let args = ["--gateway", "127.0.0.1:0", "--tls-gateway", &address, "--tls-folder", &folder];
        let opened = HostHandles::open(&parse_options(&args).unwrap(), &[NodeComponent::Activator]);
        let text = format!(
            "the TLS gateway cannot listen on {address}; choose another with --tls-gateway"
        );
        assert_eq!(opened.err().map(|error| error.to_string()), Some(text));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn certificate_files_that_cannot_be_used_end_the_start() {
        let folder = make_folder("rouse-tls-broken");
        let (certificate, key) = (format!("{folder}/a.crt"), format!("{folder}/a.key"));
        std::fs::write(&certificate, "no certificate").unwrap();
        std::fs::write(&key, "no key").unwrap();
        let args = ["--gateway", "127.0.0.1:0", "--tls-cert", &certificate, "--tls-key", &key];
        let opened = HostHandles::open(&parse_options(&args).unwrap(), &[NodeComponent::Activator]);
        let text =
            format!("{certificate} and {key} cannot be used: tls.crt holds no certificate in PEM");
        assert_eq!(opened.err().map(|error| error.to_string()), Some(text));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
