//! Frozen pods, as the kernel shows them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use local::NodeLayout;
use local::cgroups::CgroupMounts;

/// Returns true if a pod has processes and all of them are frozen; `None` if it has no cgroup.
pub fn is_frozen(pod_cgroup: &Path) -> Option<bool> {
    let events = fs::read_to_string(pod_cgroup.join("cgroup.events")).ok()?;
    Some(has_frozen_processes(&events))
}

/// Returns true if the text of a `cgroup.events` file (cgroup-v2.rst) is that of a cgroup whose processes are frozen. A
/// cgroup that lost its last process while it was frozen keeps `frozen 1`.
fn has_frozen_processes(events: &str) -> bool {
    let has_line = |wanted: &str| events.lines().any(|line| line == wanted);
    has_line("populated 1") && has_line("frozen 1")
}

/// Uids of the frozen pods of a local node. They are read from the kernel, so no component has to run.
pub fn frozen_pods(layout: &NodeLayout) -> BTreeSet<String> {
    let mounts = CgroupMounts::find().expect("cgroup v2");
    let cgroups = fs::read_dir(layout.pods_cgroup(&mounts.v2)).into_iter().flatten().flatten();
    let frozen = cgroups.filter(|cgroup| is_frozen(&cgroup.path()) == Some(true));
    let names = frozen.filter_map(|cgroup| cgroup.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix("pod").map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_frozen_only_with_its_processes() {
        assert!(has_frozen_processes("populated 1\nfrozen 1\n"));
        assert!(!has_frozen_processes("populated 1\nfrozen 0\n"));
        assert!(!has_frozen_processes("populated 0\nfrozen 1\n"), "its last process has ended");
        assert!(!has_frozen_processes("populated 1\n"), "a kernel without the freezer");
        assert_eq!(is_frozen(Path::new("/proc/no-such-cgroup")), None);
    }
}
