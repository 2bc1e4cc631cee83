//! Shell: harm done to parts of a cluster on purpose. Only to one that xtask made.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;

use super::{cgroups, network, plan::Process, process, start::Starter, state::State, up, with};
use crate::sh;

/// What is done to a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Action {
    /// Let it stand still (SIGSTOP); a node with all its pods
    Stop,
    /// Let it go on
    Resume,
    /// Let a process stand still for four fifths of a minute, in pieces; comes back after that minute
    Slow,
    /// End it at once (SIGKILL); a node with all its pods
    Kill,
    /// Start it again after `kill`
    Start,
    /// Cut a node off from all others
    Cut,
    /// Join a node that was cut off
    Join,
}

/// Does `action` to `part` of a cluster that bears xtask's mark.
pub(crate) fn run(state: &State, action: Action, part: Process) -> Result<()> {
    let mark = state.existing()?;
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
            process::end(state, part)
        }
        (Action::Start, _) if process::id(state, part).is_some() => Ok(()),
        (Action::Start, _) => with(state, |starter| starter.start(part)),
    }
}

fn group(state: &State, node: u8) -> String {
    format!("{}/node{node}", state.cgroup())
}

/// For how long a process is slow, how long it stands still each time, and how long it then runs: as long as it takes
/// a disk that others keep busy to write a few pages.
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

/// Stops or resumes every process of the node at one moment.
pub(crate) fn freeze(state: &State, node: u8, is_frozen: bool) -> Result<()> {
    let file = cgroups::v2(&group(state, node))?.join("cgroup.freeze");
    fs::write(&file, if is_frozen { "1" } else { "0" })
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Starts whatever of the node does not run.
fn start_node(starter: &Starter<'_>, node: u8) -> Result<()> {
    for part in Process::of_node(node) {
        if process::id(starter.state, part).is_none() {
            starter.start(part)?;
        }
        if part == Process::Node(node) {
            up::route(starter)?;
        }
    }
    Ok(())
}
