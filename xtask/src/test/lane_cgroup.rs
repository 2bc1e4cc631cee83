//! Shell: cgroups that give each lane of tests its own share of the processors.
//!
//! Without them the lanes would be one group beside the clusters of the tests, and a lane that builds would take the time
//! of one whose agents load eBPF programs. The v1 controller `cpu` alone is used: v2 would also change where the programs
//! of tests attach.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::TestTier;
use crate::cluster::cgroups;

/// Processor weight of a lane, in percent of the default. Tests of the tiers kernel and local run one at a time and mostly
/// wait: their lanes end last of those beside the builds, and need little.
fn weight_percent(tier: Option<TestTier>) -> u32 {
    match tier {
        Some(TestTier::Kernel | TestTier::Local) => 200,
        _ => 100,
    }
}

/// Path of a lane's cgroup below the mount. `None` is the lane of the process that builds, and runs the tiers without
/// root.
fn path(tier: Option<TestTier>) -> String {
    format!("rouse-tests-{}", tier.map_or("source", TestTier::name))
}

/// Directory of a lane's cgroup; `None` on a machine without the v1 controller.
fn directory(tier: Option<TestTier>) -> Result<Option<PathBuf>> {
    cgroups::v1_cpu_directory(&path(tier))
}

/// Creates the cgroup of a lane, with its weight. One that a killed run has left is used again.
///
/// # Errors
/// Fails if the user may not create cgroups.
pub(super) fn create(tier: Option<TestTier>) -> Result<()> {
    let Some(directory) = directory(tier)? else { return Ok(()) };
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    cgroups::set_cpu_weight(&path(tier), weight_percent(tier))
}

/// Moves this process, and with it all that it will start, into the lane's cgroup if there is one.
pub(super) fn enter(tier: Option<TestTier>) -> Result<()> {
    let directory = directory(tier)?.filter(|directory| directory.is_dir());
    directory.map_or(Ok(()), |directory| move_into(&directory))
}

fn move_into(directory: &Path) -> Result<()> {
    let file = directory.join("cgroup.procs");
    fs::write(&file, std::process::id().to_string())
        .with_context(|| format!("cannot write {}", file.display()))
}

/// Removes the cgroup of a lane whose processes have ended. Processes that are still in it keep it for the next run.
pub(super) fn remove(tier: Option<TestTier>) {
    if let Ok(Some(directory)) = directory(tier) {
        let _still_used = fs::remove_dir(directory);
    }
}

/// Guard of this process's stay in the lane that builds.
#[derive(Debug)]
pub(super) struct SourceLane;

impl SourceLane {
    /// Creates the cgroup of the lane that builds, and moves this process into it.
    pub(super) fn enter() -> Result<Self> {
        create(None)?;
        enter(None)?;
        Ok(Self)
    }
}

impl Drop for SourceLane {
    fn drop(&mut self) {
        if let Ok(Some(parent)) = cgroups::v1_cpu_directory("") {
            let _stays_in_it = move_into(&parent);
        }
        remove(None);
    }
}
