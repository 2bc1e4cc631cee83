//! Shell: removal of a cluster in any state, without leftovers.

use anyhow::Result;

use super::{cgroups, network, plan::ClusterProcess, process, state::ClusterPaths};

/// Kills all processes, then removes cgroups, namespaces and files. A cluster that does not exist is no error.
pub(crate) fn run(paths: &ClusterPaths) -> Result<()> {
    // The record may be damaged or missing: names alone identify what belongs to the cluster.
    let _ended = process::terminate(paths, ClusterProcess::Forward);
    let group = paths.cgroup();
    cgroups::kill_processes(&group)?;
    cgroups::remove(&group)?;
    network::remove(paths)?;
    paths.remove()?;
    println!("cluster {}: down", paths.name);
    Ok(())
}

/// Removes the clusters of test runs that have ended without removing them, because they were killed.
pub(crate) fn sweep() -> Result<()> {
    for paths in ClusterPaths::all() {
        // A damaged record names no owner.
        let record = paths.read_record().ok().flatten();
        let owner = record.and_then(|record| record.owner);
        if owner.is_some_and(|owner| !owner.is_running()) {
            run(&paths)?;
        }
    }
    Ok(())
}
