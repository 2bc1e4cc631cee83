//! The local node: images, pods, network and DNS on one machine.
//!
//! [`node::NodeManager`] creates and removes a node; [`run`] keeps the pods of a node spec running inside it. A pod is
//! a network namespace, a cgroup (`rouse-NAME/pods/pod<uid>`), and one OCI container for each of its containers:
//!
//! ```text
//! node spec ─▶ kubelet ─▶ pods (state machine) ─▶ net, images, runtime ─▶ process
//!                 ▲                                                       │
//!                 └──────────────────── pidfd, when it ends ──────────────┘
//! ```
//!
//! Everything that a restart needs is on disk or in the kernel, so pods outlive the process that runs this.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use common::local_node::{LocalNodeSpec, PodRunStatus};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

pub mod addresses;
pub mod bundle;
pub mod cgroups;
pub mod container_log;
pub mod dns;
pub mod images;
mod kubelet;
pub mod layout;
pub mod net;
pub mod node;
pub mod pods;
pub mod process;
pub mod runtime;
mod scoped_open;
pub mod sys;

pub use layout::NodeLayout;
pub use node::NodeManager;

/// Configuration of the process that runs a node's pods.
#[derive(Clone, Debug)]
pub struct LocalNodeConfig {
    /// Paths of the node. [`NodeManager::create`] must have made it, and the calling thread must be in its network
    /// namespace ([`NodeManager::enter`]).
    pub layout: NodeLayout,
    /// Folder of OCI layouts whose images are found by name (`rouse up --images`).
    pub images: Option<PathBuf>,
    /// OCI runtime to use; `None` means crun, or else runc.
    pub runtime: Option<runtime::OciRuntimeKind>,
    /// Network namespace of the host, in which images are pulled.
    pub host_network: Arc<OwnedFd>,
    /// Credential files for registries; the first one that knows a registry is used.
    pub credentials: Vec<PathBuf>,
}

/// Reason that a node's pods cannot be run.
#[derive(Debug, Error)]
pub enum LocalNodeError {
    /// The machine has no usable cgroups.
    #[error("cannot run pods without cgroups")]
    Cgroup(#[from] cgroups::CgroupError),
    /// No OCI runtime could be started.
    #[error("cannot run pods without an OCI runtime")]
    Runtime(#[from] runtime::OciRuntimeError),
    /// The thread for pods' networks could not be started.
    #[error("cannot connect pods")]
    Net(#[from] net::NetError),
    /// The process could not become the parent of orphaned containers.
    #[error("cannot become the parent of the pods' processes")]
    Subreaper(#[source] nix::Error),
    /// The node's cgroup for runtimes could not be opened.
    #[error("cannot open the node's cgroup: run NodeManager::create first")]
    Node(#[source] std::io::Error),
}

/// Keeps the pods of the node spec running and serves DNS, until `shutdown`.
///
/// Pods found running are adopted. Once the first node spec has arrived, those that it does not contain are stopped.
/// At shutdown the pods keep running; [`NodeManager::destroy`] ends them.
pub async fn run(
    config: LocalNodeConfig,
    node_spec: watch::Receiver<LocalNodeSpec>,
    statuses: mpsc::Sender<PodRunStatus>,
    shutdown: CancellationToken,
) -> Result<(), LocalNodeError> {
    // A container's process outlives the runtime that started it. As a subreaper this process then becomes its parent,
    // and learns its exit code.
    nix::sys::prctl::set_child_subreaper(true).map_err(LocalNodeError::Subreaper)?;
    let layout = config.layout;
    let cgroups = cgroups::CgroupMounts::find()?;
    let runtime_cgroup =
        std::fs::File::open(layout.runtime_cgroup(&cgroups.v2)).map_err(LocalNodeError::Node)?;
    let runtime =
        runtime::OciRuntime::start(config.runtime, layout.runtime(), runtime_cgroup.into())?;
    let saved = kubelet::load_pods(&layout);
    // The pods' addresses are reserved before the pool gives out any.
    let networks = net::PodNetworkPool::start(saved.iter().filter_map(|saved| saved.address))?;
    let puller = images::ImagePuller::new(config.host_network, config.credentials);
    let images = images::ImageStore::new(layout.images(), config.images, puller);
    info!(node = layout.name(), runtime = runtime.name(), pods = saved.len(), "running pods");
    let dns = dns::serve((layout::DNS_ADDRESS, 53).into(), node_spec.clone(), shutdown.clone());
    let dns = tokio::spawn(async move {
        if let Err(error) = dns.await {
            error!(error = &error as &dyn std::error::Error, "the DNS server has ended");
        }
    });
    let shared = kubelet::KubeletResources { layout, cgroups, images, networks, runtime };
    let kubelet = kubelet::LocalKubelet::adopt_pods(Arc::new(shared), saved);
    kubelet.serve(node_spec, statuses, shutdown).await;
    let _ = dns.await;
    Ok(())
}
