//! Shell: search for the cgroups of this node's pods and of its kubelet in the file system.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::kernel::cgroups::{self, PodsCgroupError};

/// Depth below the mount at which a kubelet may keep its pods' directory: with `cgroupRoot: /a/b` it is three.
const KUBEPODS_DEPTH_MAX: usize = 4;
/// Depth below the pods' directory at which a container may be, nested containers included.
const CONTAINER_DEPTH_MAX: usize = 6;
/// Depth of pod directories below the pods' cgroup: `kubepods-burstable.slice/…-pod<uid>.slice` is two, and three if
/// `kubepods.slice` is above that.
pub(crate) const POD_DIRECTORY_DEPTH: usize = 3;
/// Path at which a container sees its own cgroups.
const OWN_MOUNT: &str = "/sys/fs/cgroup";

/// Finds the cgroup of this node's pods in any layout.
pub(crate) fn find_pods_cgroup() -> Result<PathBuf, PodsCgroupError> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = cgroups::v2_mounts(&mountinfo);
    let mount = mounts.first().ok_or(PodsCgroupError::NoMount)?;
    let mut candidates = Vec::new();
    collect_kubepods(mount, KUBEPODS_DEPTH_MAX, &mut candidates);
    // The order of a directory is random: sorted, an error names the candidates in a stable order.
    candidates.sort();
    cgroups::choose_pods_cgroup(&candidates, own_cgroup(mount, &candidates).as_deref())
}

/// Finds the cgroup of the kubelet whose pods are below `pods`. `None` if the agent does not see the node's processes,
/// or none of them is that kubelet.
pub(crate) fn find_kubelet_cgroup(pods: &Path) -> Option<PathBuf> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = cgroups::v2_mounts(&mountinfo).into_iter().next()?;
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    // In a cgroup namespace, paths of other processes are relative to the agent's own cgroup.
    let root = match cgroups::own_cgroup_path(&own) {
        Some(_) => mount,
        None => own_cgroup_by_inode(&[pods.to_owned()])?,
    };
    let processes = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path());
    let text = |process: &Path, file: &str| fs::read_to_string(process.join(file)).ok();
    let kubelets =
        processes.filter(|it| text(it, "comm").is_some_and(|comm| cgroups::is_kubelet(&comm)));
    let all = kubelets
        .filter_map(|it| cgroups::resolve_cgroup_path(&root, &text(&it, "cgroup")?))
        .collect();
    cgroups::nearest_kubelet(pods, &all)
}

/// Returns the agent's own cgroup: by its name, or, if a cgroup namespace hides that, by the inode of its root.
fn own_cgroup(mount: &Path, candidates: &[PathBuf]) -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    if let Some(path) = cgroups::own_cgroup_path(&text) {
        return Some(mount.join(path));
    }
    own_cgroup_by_inode(candidates)
}

fn own_cgroup_by_inode(candidates: &[PathBuf]) -> Option<PathBuf> {
    let inode = fs::metadata(OWN_MOUNT).ok()?.ino();
    candidates.iter().find_map(|candidate| find_by_inode(candidate, inode, CONTAINER_DEPTH_MAX))
}

fn collect_kubepods(dir: &Path, depth: usize, paths: &mut Vec<PathBuf>) {
    for child in subdirectories(dir) {
        if child.file_name().is_some_and(cgroups::is_kubepods) {
            paths.push(child);
        } else if depth > 1 {
            collect_kubepods(&child, depth - 1, paths);
        }
    }
}

fn find_by_inode(dir: &Path, inode: u64, depth: usize) -> Option<PathBuf> {
    subdirectories(dir).into_iter().find_map(|child| {
        let is_it = fs::metadata(&child).is_ok_and(|metadata| metadata.ino() == inode);
        if is_it {
            return Some(child);
        }
        (depth > 1).then(|| find_by_inode(&child, inode, depth - 1)).flatten()
    })
}

/// Returns the directories of all pods below `root`, wherever a kubelet puts them.
pub(crate) fn pod_directories(root: &Path) -> Vec<PathBuf> {
    let mut pods = Vec::new();
    collect_pods(root, POD_DIRECTORY_DEPTH, &mut pods);
    pods
}

fn collect_pods(dir: &Path, depth: usize, pods: &mut Vec<PathBuf>) {
    for child in subdirectories(dir) {
        if child.file_name().and_then(cgroups::pod_uid).is_some() {
            pods.push(child);
        } else if depth > 1 {
            collect_pods(&child, depth - 1, pods);
        }
    }
}

/// Returns the directories directly below `dir`; none if it is gone or cannot be read.
pub(crate) fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    try_subdirectories(dir).unwrap_or_default()
}

/// Returns the directories directly below `dir`; none if it is gone.
pub(crate) fn try_subdirectories(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut dirs = Vec::new();
    for entry in none_if_removed(fs::read_dir(dir))?.into_iter().flatten() {
        // A directory that is removed meanwhile has no further entries.
        let Some(entry) = none_if_removed(entry)? else { break };
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            dirs.push(entry.path());
        }
    }
    Ok(dirs)
}

/// Returns the result of a read of a cgroup; `None` if the cgroup is gone, or has threads only.
pub(crate) fn none_if_removed<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    // An open file of a removed cgroup has no device. A threaded cgroup lists no processes.
    const NO_PROCESSES: [i32; 3] = [libc::ENOENT, libc::ENODEV, libc::EOPNOTSUPP];
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.raw_os_error().is_some_and(|it| NO_PROCESSES.contains(&it)) => Ok(None),
        Err(error) => Err(error),
    }
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
        let mut paths = Vec::new();
        collect_kubepods(&root, KUBEPODS_DEPTH_MAX, &mut paths);
        paths.sort();
        let wanted = ["a.slice/a-kubepods.slice", "a/kubepods", "kubepods"];
        let mut wanted = wanted.map(|path| root.join(path));
        wanted.sort();
        assert_eq!(paths, wanted);
        let inode = fs::metadata(root.join("kubepods/burstable/podx")).expect("made").ino();
        let pod = find_by_inode(&root.join("kubepods"), inode, CONTAINER_DEPTH_MAX);
        assert_eq!(pod, Some(root.join("kubepods/burstable/podx")));
        fs::remove_dir_all(root).expect("removed");
    }
}
