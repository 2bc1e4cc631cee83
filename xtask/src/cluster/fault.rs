//! Shell: injection of faults into a cluster, only into one that xtask created.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;

use super::{
    cgroups, network, plan::ClusterProcess, process, start::ClusterStarter, state::ClusterPaths,
    up, with_existing_cluster,
};
use crate::sh;

/// Fault to inject, or its reversal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FaultAction {
    /// Suspend a process (SIGSTOP), or a node with all its pods
    Stop,
    /// Continue what `stop` has suspended
    Resume,
    /// Suspend a process again and again, 400 ms of every 500, for one minute
    Slow,
    /// Kill a process at once (SIGKILL), or a node with all its pods
    Kill,
    /// Start a process or node again after `kill`
    Start,
    /// Start a node again after `kill`, without kube-proxy
    Boot,
    /// Disconnect a node from all others
    Cut,
    /// Connect a node again after `cut`
    Join,
}

/// Applies `action` to `process` of a cluster that has xtask's record.
pub(crate) fn run(
    paths: &ClusterPaths,
    action: FaultAction,
    process: ClusterProcess,
) -> Result<()> {
    let record = paths.require_record()?;
    // A fault in a node that does not exist would have no effect and report none.
    if process.node().is_some_and(|node| node > record.nodes) {
        bail!("{process} does not exist: the cluster has {} nodes", record.nodes);
    }
    match (action, process) {
        (FaultAction::Stop, ClusterProcess::Node(node)) => set_frozen(paths, node, true),
        (FaultAction::Resume, ClusterProcess::Node(node)) => set_frozen(paths, node, false),
        (FaultAction::Kill, ClusterProcess::Node(node)) => {
            cgroups::kill_processes(&node_cgroup(paths, node))
        }
        (FaultAction::Start, ClusterProcess::Node(node)) => {
            with_existing_cluster(paths, |starter| start_node(starter, node, true))
        }
        (FaultAction::Boot, ClusterProcess::Node(node)) => {
            with_existing_cluster(paths, |starter| start_node(starter, node, false))
        }
        (FaultAction::Boot, _) => bail!("only a node can boot; {process} is none"),
        (FaultAction::Cut, ClusterProcess::Node(node)) => {
            network::set_disconnected(paths, node, true)
        }
        (FaultAction::Join, ClusterProcess::Node(node)) => {
            network::set_disconnected(paths, node, false)
        }
        (FaultAction::Cut | FaultAction::Join, _) => {
            bail!("only a node can be cut off; {process} is none")
        }
        (FaultAction::Slow, ClusterProcess::Node(_)) => {
            bail!("only a process can be slow; {process} is a node")
        }
        (FaultAction::Slow, _) => slow_down(paths, process),
        (FaultAction::Stop, _) => process::signal(paths, process, Signal::SIGSTOP),
        (FaultAction::Resume, _) => process::signal(paths, process, Signal::SIGCONT),
        (FaultAction::Kill, _) => {
            process::signal(paths, process, Signal::SIGKILL)?;
            // Waits until the process is gone, so that a following `start` does not find it.
            process::terminate(paths, process)
        }
        (FaultAction::Start, _) if process::pid_of(paths, process).is_some() => Ok(()),
        (FaultAction::Start, _) => with_existing_cluster(paths, |starter| starter.start(process)),
    }
}

fn node_cgroup(paths: &ClusterPaths, node: u8) -> String {
    format!("{}/node{node}", paths.cgroup())
}

/// Duration of a slowdown, length of each suspension, and running time between two. The suspension is as long as a
/// busy disk needs to write a few pages.
const SLOWDOWN: (Duration, Duration, Duration) =
    (Duration::from_secs(60), Duration::from_millis(400), Duration::from_millis(100));

fn slow_down(paths: &ClusterPaths, process: ClusterProcess) -> Result<()> {
    let (slowdown, suspension, running) = SLOWDOWN;
    let started = Instant::now();
    while started.elapsed() < slowdown {
        process::signal(paths, process, Signal::SIGSTOP)?;
        sh::sleep(suspension);
        process::signal(paths, process, Signal::SIGCONT)?;
        sh::sleep(running);
    }
    Ok(())
}

/// Suspends or continues every process of the node at one moment.
pub(crate) fn set_frozen(paths: &ClusterPaths, node: u8, is_frozen: bool) -> Result<()> {
    let file = cgroups::v2_directory(&node_cgroup(paths, node))?.join("cgroup.freeze");
    fs::write(&file, if is_frozen { "1" } else { "0" })
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Starts the processes of the node that do not run, with or without kube-proxy.
fn start_node(starter: &ClusterStarter<'_>, node: u8, has_proxy: bool) -> Result<()> {
    for process in ClusterProcess::node_processes(node) {
        let is_left_out = !has_proxy && process == ClusterProcess::Proxy(node);
        if !is_left_out && process::pid_of(starter.paths, process).is_none() {
            starter.start(process)?;
        }
        // A new namespace has no routes yet, and the kubelet needs the API server from its start.
        if process == ClusterProcess::Node(node) {
            up::set_routes(starter)?;
        }
    }
    Ok(())
}
