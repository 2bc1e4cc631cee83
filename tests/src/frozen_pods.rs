//! Frozen pods, as the kernel shows them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use agent::kernel::freezer;
use local::NodeLayout;
use local::cgroups::CgroupMounts;

/// Returns true if a pod has processes and all of them are frozen; `None` if it has no cgroup. A cgroup that lost its last
/// process while it was frozen keeps `frozen 1`.
pub fn is_frozen(pod_cgroup: &Path) -> Option<bool> {
    let state = freezer::read_state(pod_cgroup).ok()??;
    Some(state.is_populated && state.is_frozen)
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
        // A plain folder stands in for the cgroup.
        let cgroup = std::env::temp_dir().join(format!("rouse-is-frozen-{}", std::process::id()));
        fs::create_dir_all(&cgroup).unwrap();
        let has_frozen_processes = |events: &str| {
            fs::write(cgroup.join("cgroup.events"), events).unwrap();
            is_frozen(&cgroup).unwrap()
        };
        assert!(has_frozen_processes("populated 1\nfrozen 1\n"));
        assert!(!has_frozen_processes("populated 1\nfrozen 0\n"));
        assert!(!has_frozen_processes("populated 0\nfrozen 1\n"), "its last process has ended");
        assert!(!has_frozen_processes("populated 1\n"), "a kernel without the freezer");
        fs::remove_dir_all(&cgroup).unwrap();
        assert_eq!(is_frozen(Path::new("/proc/no-such-cgroup")), None);
    }
}
