//! Pure: paths of the cgroups and pins that the agent works with.

use std::path::PathBuf;

use crate::map_sizes::MapSizes;

/// Paths of the cgroups and pins that the agent works with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentPaths {
    /// Folder on a bpf filesystem, with the pins of all versions. If it is on another filesystem, the agent mounts one
    /// there.
    pub bpffs: PathBuf,
    /// Cgroup below which connects are redirected.
    pub clients: PathBuf,
    /// Cgroup below which the pods' cgroups are.
    pub pods: PathBuf,
    /// Cgroup of the kubelet, if its connections are to be marked as probes.
    pub kubelet: Option<PathBuf>,
    /// ABI version of the pins: this build's version, except in tests of upgrades.
    pub version: u32,
    /// Sizes of the maps.
    pub map_sizes: MapSizes,
}

impl AgentPaths {
    /// Returns the folder of the pins of this version and these sizes: `v<version>` below the bpf filesystem, or
    /// `v<version>-<sizes>` if the sizes are not the default ones.
    pub fn pins(&self) -> PathBuf {
        self.bpffs.join(format!("v{}{}", self.version, self.map_sizes.pins_suffix()))
    }
}
