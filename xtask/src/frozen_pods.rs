//! Shell: frozen pods, as the kernel shows them below a cgroup.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns the directories of the frozen pods below `root`: the cgroup of a local node's pods, or of a node of a
/// cluster.
pub(crate) fn frozen_pods(root: &Path) -> Vec<PathBuf> {
    let (mut frozen, mut pending) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = pending.pop() {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()).filter(|path| path.is_dir()) {
            match is_pod(&path) {
                // The cgroups below are those of its containers.
                true => frozen.extend(is_frozen(&path).then_some(path)),
                false => pending.push(path),
            }
        }
    }
    frozen
}

/// Returns true if the directory has the name of a pod's cgroup: `pod`, and the pod's uid.
fn is_pod(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // The directory `pods` of a local node contains those of its pods.
    name.strip_prefix("pod").is_some_and(|uid| !uid.is_empty() && uid != "s")
}

fn is_frozen(pod: &Path) -> bool {
    let events = fs::read_to_string(pod.join("cgroup.events")).unwrap_or_default();
    // A cgroup that lost its last process while it was frozen keeps `frozen 1`.
    ["populated 1", "frozen 1"].iter().all(|wanted| events.lines().any(|line| line == *wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pods_whose_processes_are_frozen_are_found_at_any_depth() {
        let root = std::env::temp_dir().join(format!("rouse-xtask-frozen-{}", std::process::id()));
        for (pod, events) in [
            ("pods/pod1", "populated 1\nfrozen 1\n"),
            ("pods/pod2", "populated 1\nfrozen 0\n"),
            ("kubepods/besteffort/pod3", "populated 1\nfrozen 1\n"),
            ("kubepods/pod4", "populated 0\nfrozen 1\n"),
            ("kubepods/burstable", "populated 1\nfrozen 1\n"),
        ] {
            fs::create_dir_all(root.join(pod)).unwrap();
            fs::write(root.join(pod).join("cgroup.events"), events).unwrap();
        }
        let mut found = frozen_pods(&root);
        found.sort();
        fs::remove_dir_all(&root).unwrap();
        let expected = ["kubepods/besteffort/pod3", "pods/pod1"].map(|path| root.join(path));
        assert_eq!(found, expected);
    }
}
