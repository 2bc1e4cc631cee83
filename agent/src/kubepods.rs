//! Shell: search for the cgroups of this node's pods and of its kubelet in the file system.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::cgroups::{self, Unfound};

/// Depth below the mount at which a kubelet may keep its pods' directory: `cgroupRoot: /a/b` is two.
const DEPTH: usize = 4;
/// Depth below the pods' directory at which a container may be, nested containers included.
const BELOW: usize = 6;
/// Path at which a container sees its own cgroups.
const OWN_MOUNT: &str = "/sys/fs/cgroup";

/// Finds the cgroup of this node's pods in any layout.
pub(crate) fn find() -> Result<PathBuf, Unfound> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = cgroups::v2_mounts(&mountinfo);
    let mount = mounts.first().ok_or(Unfound::NoMount)?;
    let mut candidates = Vec::new();
    collect(mount, DEPTH, &mut candidates);
    // The order of a directory is random: sorted, an error names the candidates in a stable order.
    candidates.sort();
    cgroups::choose(&candidates, own(mount, &candidates).as_deref())
}

/// Finds the cgroup of the kubelet whose pods are below `pods`. `None` if the agent does not see the node's processes,
/// or none of them is that kubelet.
pub(crate) fn kubelet(pods: &Path) -> Option<PathBuf> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = cgroups::v2_mounts(&mountinfo).into_iter().next()?;
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    // In a cgroup namespace, paths of other processes are relative to the agent's own cgroup.
    let root = match cgroups::own_path(&own) {
        Some(_) => mount,
        None => own_by_inode(&[pods.to_owned()])?,
    };
    let processes = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path());
    let text = |process: &Path, file: &str| fs::read_to_string(process.join(file)).ok();
    let kubelets =
        processes.filter(|it| text(it, "comm").is_some_and(|comm| cgroups::is_kubelet(&comm)));
    let all = kubelets.filter_map(|it| cgroups::path_from(&root, &text(&it, "cgroup")?)).collect();
    cgroups::kubelet_of(pods, &all)
}

/// Returns the agent's own cgroup: by its name, or, if a cgroup namespace hides that, by the inode of its root.
fn own(mount: &Path, candidates: &[PathBuf]) -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    if let Some(path) = cgroups::own_path(&text) {
        return Some(mount.join(path));
    }
    own_by_inode(candidates)
}

fn own_by_inode(candidates: &[PathBuf]) -> Option<PathBuf> {
    let inode = fs::metadata(OWN_MOUNT).ok()?.ino();
    candidates.iter().find_map(|candidate| with_inode(candidate, inode, BELOW))
}

fn collect(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    for child in children(dir) {
        if child.file_name().is_some_and(cgroups::is_kubepods) {
            found.push(child);
        } else if depth > 1 {
            collect(&child, depth - 1, found);
        }
    }
}

fn with_inode(dir: &Path, inode: u64, depth: usize) -> Option<PathBuf> {
    children(dir).into_iter().find_map(|child| {
        let is_it = fs::metadata(&child).is_ok_and(|found| found.ino() == inode);
        if is_it {
            return Some(child);
        }
        (depth > 1).then(|| with_inode(&child, inode, depth - 1)).flatten()
    })
}

/// Returns the directories directly below `dir`; none if it is gone.
pub(crate) fn children(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kubelets_folder_is_found_and_nothing_in_it() {
        let root = std::env::temp_dir().join(format!("rouse-kubepods-{}", std::process::id()));
        for path in ["kubepods/burstable/podx/kubepods", "a/kubepods", "a.slice/a-kubepods.slice"] {
            fs::create_dir_all(root.join(path)).expect("a folder");
        }
        let mut found = Vec::new();
        collect(&root, DEPTH, &mut found);
        found.sort();
        let wanted = ["a.slice/a-kubepods.slice", "a/kubepods", "kubepods"];
        let mut wanted = wanted.map(|path| root.join(path));
        wanted.sort();
        assert_eq!(found, wanted);
        let inode = fs::metadata(root.join("kubepods/burstable/podx")).expect("made").ino();
        let pod = with_inode(&root.join("kubepods"), inode, BELOW);
        assert_eq!(pod, Some(root.join("kubepods/burstable/podx")));
        fs::remove_dir_all(root).expect("removed");
    }
}
