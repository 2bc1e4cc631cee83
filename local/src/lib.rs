//! The tiny node: images, pods, network, names.
//!
//! [`node::Node`] makes and removes what a node consists of; [`run`] keeps the ordered pods running inside it. A pod is
//! a network namespace, a cgroup (`rouse-NAME/pods/pod<uid>`) and one OCI container for each of its containers:
//!
//! ```text
//! Orders ─▶ kubelet ─▶ pods (the machine) ─▶ net, images, runtime ─▶ process
//!              ▲                                                       │
//!              └──────────────────── pidfd, when it ends ──────────────┘
//! ```
//!
//! Everything a restart needs is on disk or in the kernel, so pods outlive the process that runs this.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use common::node::{Orders, PodStatus};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

pub mod addresses;
pub mod bundle;
pub mod cgroups;
pub mod dns;
pub mod images;
mod kubelet;
pub mod layout;
pub mod net;
pub mod node;
pub mod pods;
pub mod process;
pub mod quantity;
pub mod runtime;
pub mod sys;

pub use layout::Layout;
pub use node::Node;

/// How a node runs its pods.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where everything lies. [`Node::create`] made it, and the calling thread is inside ([`Node::enter`]).
    pub layout: Layout,
    /// Folder of OCI layouts that go by their names (`rouse up --images`).
    pub images: Option<PathBuf>,
    /// The OCI runtime; crun, else runc, when `None`.
    pub runtime: Option<runtime::Kind>,
    /// The host's network namespace, where images are pulled.
    pub host_network: Arc<OwnedFd>,
    /// Files with registries' credentials, the first that knows a registry counts.
    pub credentials: Vec<PathBuf>,
}

/// Why the node stopped.
#[derive(Debug, Error)]
pub enum Error {
    /// No cgroups.
    #[error("cannot run pods without cgroups")]
    Cgroup(#[from] cgroups::CgroupError),
    /// No runtime.
    #[error("cannot run pods without an OCI runtime")]
    Runtime(#[from] runtime::RuntimeError),
    /// No network.
    #[error("cannot connect pods")]
    Net(#[from] net::NetError),
    /// Orphans could not be kept.
    #[error("cannot become the parent of the pods' processes")]
    Subreaper(#[source] nix::Error),
    /// A cgroup could not be opened.
    #[error("cannot open the node's cgroup: run Node::create first")]
    Node(#[source] std::io::Error),
}

/// Keeps the ordered pods running and answers names, until `shutdown`.
///
/// Pods found running are adopted; those without an order are stopped once the first orders have come, not before.
/// At shutdown the pods stay; [`Node::destroy`] ends them.
pub async fn run(
    config: Config,
    orders: watch::Receiver<Orders>,
    statuses: mpsc::Sender<PodStatus>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    // A container's process outlives the runtime that started it; then it becomes our child, and tells how it ended.
    nix::sys::prctl::set_child_subreaper(true).map_err(Error::Subreaper)?;
    let layout = config.layout;
    let mounts = cgroups::Mounts::find()?;
    let birth = std::fs::File::open(layout.runtime_cgroup(&mounts.v2)).map_err(Error::Node)?;
    let runtime = runtime::Runtime::start(config.runtime, layout.runtime(), birth.into())?;
    let saved = kubelet::load(&layout);
    let networks = net::Networks::start(saved.iter().filter_map(|saved| saved.address))?;
    let puller = images::Puller::new(config.host_network, config.credentials);
    let images = images::Images::new(layout.images(), config.images, puller);
    info!(node = layout.name(), runtime = runtime.name(), pods = saved.len(), "running pods");
    let dns = dns::serve((layout::DNS, 53).into(), orders.clone(), shutdown.clone());
    let dns = tokio::spawn(async move {
        if let Err(error) = dns.await {
            error!(error = &error as &dyn std::error::Error, "names are not answered");
        }
    });
    let shared = kubelet::Shared { layout, mounts, images, networks, runtime };
    let kubelet = kubelet::Kubelet::adopt(Arc::new(shared), saved);
    kubelet.serve(orders, statuses, shutdown).await;
    let _ = dns.await;
    Ok(())
}
