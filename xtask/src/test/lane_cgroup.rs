//! Shell: cgroups that give each lane of tests its own share of the processors.
//!
//! Without them the lanes would be one group beside the clusters of the tests, and a lane that builds would take the time
//! of one whose agents load eBPF programs. The v1 controller `cpu` alone is used: v2 would also change where the programs
//! of tests attach.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};

use super::TestTier;
use crate::cluster::cgroups;

/// Directory of the lane's cgroup; `None` on a machine without the v1 controller.
fn directory(tier: TestTier) -> Result<Option<PathBuf>> {
    cgroups::v1_cpu_directory(&format!("rouse-tests-{}", tier.name()))
}

/// Creates the cgroup of a lane, with the kernel's default weight. One that a killed run has left is used again.
///
/// # Errors
/// Fails if the user may not create cgroups.
pub(super) fn create(tier: TestTier) -> Result<()> {
    let Some(directory) = directory(tier)? else { return Ok(()) };
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))
}

/// Moves this process, and with it all that it will start, into the lane's cgroup if there is one.
pub(super) fn enter(tier: TestTier) -> Result<()> {
    let Some(directory) = directory(tier)?.filter(|directory| directory.is_dir()) else {
        return Ok(());
    };
    let file = directory.join("cgroup.procs");
    fs::write(&file, std::process::id().to_string())
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Removes the cgroup of a lane whose processes have ended. Processes that are still in it keep it for the next run.
pub(super) fn remove(tier: TestTier) {
    if let Ok(Some(directory)) = directory(tier) {
        let _still_used = fs::remove_dir(directory);
    }
}
