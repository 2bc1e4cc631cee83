//! Shell: removes a cluster without a trace, in whatever state it is.

use anyhow::Result;

use super::{cgroups, network, plan::Process, process, state::State};

/// Ends all processes, then removes cgroups, namespaces and files. A cluster that is not there is no error.
pub(crate) fn run(state: &State) -> Result<()> {
    // Also where the mark is damaged or was never written: names alone say what belongs to the cluster.
    let _ended = process::end(state, Process::Forward);
    let group = state.cgroup();
    cgroups::kill(&group)?;
    cgroups::remove(&group)?;
    network::remove(state)?;
    state.remove()?;
    println!("cluster {}: down", state.name);
    Ok(())
}
