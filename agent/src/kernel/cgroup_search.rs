//! Shell: search for the cgroups of this node's pods and of its kubelet, in the file system of cgroups.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use tracing::warn;

use crate::kernel::cgroups::{self, PodsCgroupError};

/// Greatest depth below the mount at which the directory of a kubelet's pods is searched: with `cgroupRoot: /a/b` in
/// the kubelet's configuration it is at three.
const KUBEPODS_DEPTH_MAX: usize = 4;
/// Greatest depth below the pods' directory at which the agent's own container is searched, nested containers included.
const CONTAINER_DEPTH_MAX: usize = 6;
/// Greatest depth of pod directories below the pods' cgroup. With the systemd driver,
/// `kubepods-burstable.slice/…-pod<uid>.slice` is at two, and at three if `kubepods.slice` is above it.
pub(crate) const POD_DIRECTORY_DEPTH: usize = 3;
/// Path at which a container sees its own cgroups.
const OWN_MOUNT: &str = "/sys/fs/cgroup";

/// Finds the cgroup of this node's pods, wherever the kubelet has it and whatever its cgroup driver is.
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
    // In a cgroup namespace, the paths of other processes are relative to the agent's own cgroup. The namespace hides
    // its path, but not the inode of its directory.
    let root = match cgroups::own_cgroup_path(&own) {
        Some(_) => mount,
        None => own_cgroup_by_inode(&[pods.to_owned()])?,
    };
    let processes = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path());
    let text = |process: &Path, file: &str| fs::read_to_string(process.join(file)).ok();
    let kubelets =
        processes.filter(|it| text(it, "comm").is_some_and(|comm| cgroups::is_kubelet(&comm)));
    // One machine may run several kubelets, each with its own tree of pods.
    let candidates = kubelets
        .filter_map(|it| cgroups::resolve_cgroup_path(&root, &text(&it, "cgroup")?))
        .collect();
    cgroups::nearest_kubelet(pods, &candidates)
}

/// Returns the agent's own cgroup: by its path, or, if a cgroup namespace hides the path, by the inode of its
/// directory. `candidates` are the directories below which it may be.
fn own_cgroup(mount: &Path, candidates: &[PathBuf]) -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    if let Some(path) = cgroups::own_cgroup_path(&text) {
        return Some(mount.join(path));
    }
    own_cgroup_by_inode(candidates)
}

/// Finds the agent's own cgroup below `candidates`, as the directory that the agent sees as its mount.
fn own_cgroup_by_inode(candidates: &[PathBuf]) -> Option<PathBuf> {
    let inode = fs::metadata(OWN_MOUNT).ok()?.ino();
    candidates.iter().find_map(|candidate| find_by_inode(candidate, inode, CONTAINER_DEPTH_MAX))
}

/// Adds the directories of kubelets' pods below `dir` to `paths`, without those that are nested in one of them.
fn collect_kubepods(dir: &Path, depth: usize, paths: &mut Vec<PathBuf>) {
    for child in subdirectories(dir) {
        if child.file_name().is_some_and(cgroups::is_kubepods) {
            paths.push(child);
        } else if depth > 1 {
            collect_kubepods(&child, depth - 1, paths);
        }
    }
}

/// Finds the directory with this inode below `dir`.
fn find_by_inode(dir: &Path, inode: u64, depth: usize) -> Option<PathBuf> {
    subdirectories(dir).into_iter().find_map(|child| {
        let has_inode = fs::metadata(&child).is_ok_and(|metadata| metadata.ino() == inode);
        if has_inode {
            return Some(child);
        }
        (depth > 1).then(|| find_by_inode(&child, inode, depth - 1)).flatten()
    })
}

/// Returns the directories of all pods below `root`, by the names that each cgroup driver gives them.
pub(crate) fn pod_directories(root: &Path) -> Vec<PathBuf> {
    let mut pods = Vec::new();
    collect_pods(root, POD_DIRECTORY_DEPTH, &mut pods);
    pods
}

/// Adds the directories of pods below `dir` to `pods`. Directories in a pod are its containers', and are not searched.
fn collect_pods(dir: &Path, depth: usize, pods: &mut Vec<PathBuf>) {
    for child in subdirectories(dir) {
        if child.file_name().and_then(cgroups::pod_uid).is_some() {
            pods.push(child);
        } else if depth > 1 {
            collect_pods(&child, depth - 1, pods);
        }
    }
}

/// Returns the directories directly below `dir`; none if it is gone or cannot be read, which is logged.
pub(crate) fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    try_subdirectories(dir).unwrap_or_else(|error| {
        warn!(dir = %dir.display(), %error, "cannot list a directory of cgroups");
        Vec::new()
    })
}

/// Returns the directories directly below `dir`; none if it is gone. Returns an error if it cannot be read.
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

/// Returns the result of an access to a file of a cgroup; `None` if the cgroup is gone, or has threads only.
pub(crate) fn none_if_removed<T>(access: io::Result<T>) -> io::Result<Option<T>> {
    // An open file of a removed cgroup gives ENODEV. `cgroup.procs` of a threaded cgroup gives EOPNOTSUPP.
    const NO_PROCESSES: [i32; 3] = [libc::ENOENT, libc::ENODEV, libc::EOPNOTSUPP];
    match access {
        Ok(value) => Ok(Some(value)),
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
