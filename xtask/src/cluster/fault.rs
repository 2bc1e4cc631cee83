//! Shell: injection of faults into a cluster, only into one that xtask created.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;

use super::{cgroups, network, plan::Process, process, start::Starter, state::State, up, with};
use crate::sh;

/// Fault to inject, or its reversal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Action {
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
    /// Disconnect a node from all others
    Cut,
    /// Connect a node again after `cut`
    Join,
}

/// Applies `action` to `part` of a cluster that has xtask's record.
pub(crate) fn run(state: &State, action: Action, part: Process) -> Result<()> {
    let mark = state.existing()?;
    // A fault in a node that does not exist would be silently without effect.
    if part.node().is_some_and(|node| node > mark.nodes) {
        bail!("{part} is not there: the cluster has {} nodes", mark.nodes);
    }
    match (action, part) {
        (Action::Stop, Process::Node(node)) => freeze(state, node, true),
        (Action::Resume, Process::Node(node)) => freeze(state, node, false),
        (Action::Kill, Process::Node(node)) => cgroups::kill(&group(state, node)),
        (Action::Start, Process::Node(node)) => with(state, |starter| start_node(starter, node)),
        (Action::Cut, Process::Node(node)) => network::set_cut(state, node, true),
        (Action::Join, Process::Node(node)) => network::set_cut(state, node, false),
        (Action::Cut | Action::Join, _) => bail!("only a node can be cut off; {part} is none"),
        (Action::Slow, Process::Node(_)) => bail!("only a process can be slow; {part} is a node"),
        (Action::Slow, _) => slow(state, part),
        (Action::Stop, _) => process::signal(state, part, Signal::SIGSTOP),
        (Action::Resume, _) => process::signal(state, part, Signal::SIGCONT),
        (Action::Kill, _) => {
            process::signal(state, part, Signal::SIGKILL)?;
            // Waits until the process is gone, so that a following `start` does not find it.
            process::end(state, part)
        }
        (Action::Start, _) if process::id(state, part).is_some() => Ok(()),
        (Action::Start, _) => with(state, |starter| starter.start(part)),
    }
}

fn group(state: &State, node: u8) -> String {
    format!("{}/node{node}", state.cgroup())
}

/// Duration of a slowdown, length of each suspension, and running time between two. The suspension is as long as a
/// busy disk needs to write a few pages.
const SLOW: (Duration, Duration, Duration) =
    (Duration::from_secs(60), Duration::from_millis(400), Duration::from_millis(100));

fn slow(state: &State, part: Process) -> Result<()> {
    let (whole, still, runs) = SLOW;
    let started = Instant::now();
    while started.elapsed() < whole {
        process::signal(state, part, Signal::SIGSTOP)?;
        sh::pause(still);
        process::signal(state, part, Signal::SIGCONT)?;
        sh::pause(runs);
    }
    Ok(())
}

/// Suspends or continues every process of the node at one moment.
pub(crate) fn freeze(state: &State, node: u8, is_frozen: bool) -> Result<()> {
    let file = cgroups::v2(&group(state, node))?.join("cgroup.freeze");
    fs::write(&file, if is_frozen { "1" } else { "0" })
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Starts the processes of the node that do not run.
fn start_node(starter: &Starter<'_>, node: u8) -> Result<()> {
    for part in Process::of_node(node) {
        if process::id(starter.state, part).is_none() {
            starter.start(part)?;
        }
        // A new namespace has no routes yet, and the kubelet needs the API server from its start.
        if part == Process::Node(node) {
            up::route(starter)?;
        }
    }
    Ok(())
}
