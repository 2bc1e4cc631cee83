//! Shell: processes of a cgroup, the network namespaces that they are in, and sessions among them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use super::namespace::{self, NamespaceError, NetworkNamespace};
use crate::kernel::{
    cgroup_search::{none_if_removed, try_subdirectories},
    cgroups::is_runtime_monitor,
};

/// Returns every process in the cgroup `dir` and below; none if it is gone.
///
/// Returns an error if one of these cgroups cannot be read, as without a free file descriptor. Then nothing is known of
/// the processes.
pub(crate) fn processes(dir: &Path) -> io::Result<Vec<u32>> {
    let text = none_if_removed(fs::read_to_string(dir.join("cgroup.procs")))?.unwrap_or_default();
    // Processes of another pid namespace are listed as 0.
    let direct = text.lines().filter_map(|line| line.parse().ok()).filter(|&pid| pid != 0);
    let mut pids: Vec<u32> = direct.collect();
    for child in try_subdirectories(dir)? {
        if !child.file_name().is_some_and(is_runtime_monitor) {
            pids.extend(processes(&child)?);
        }
    }
    Ok(pids)
}

/// Returns the processes in the cgroup `dir` and below by the inode of their network namespace, in ascending order.
/// Returns an error like [`processes`].
pub(crate) fn processes_by_namespace(dir: &Path) -> io::Result<BTreeMap<u64, Vec<u32>>> {
    let mut namespaces = BTreeMap::<u64, Vec<u32>>::new();
    for pid in processes(dir)? {
        // The process may have ended.
        let Ok(inode) = namespace::inode(&namespace_path(pid)) else { continue };
        namespaces.entry(inode).or_default().push(pid);
    }
    namespaces.values_mut().for_each(|pids| pids.sort_unstable());
    Ok(namespaces)
}

/// Returns true if a pod has sessions: processes that are neither a container's first one nor descendants of it, as
/// `kubectl exec` or an exec probe starts them. `pod` is the directory of the pod's cgroup.
///
/// The runtime, which is outside of the pod, starts both first processes and sessions. So a container has one process
/// with a parent outside of the pod, and more if it has sessions. Returns an error like [`processes`].
pub(crate) fn has_sessions(pod: &Path) -> io::Result<bool> {
    let own: BTreeSet<u32> = processes(pod)?.into_iter().collect();
    for container in try_subdirectories(pod)? {
        if container.file_name().is_some_and(is_runtime_monitor) {
            continue;
        }
        let parents = processes(&container)?.into_iter().filter_map(parent_of);
        // A process that has ended meanwhile has no parent, and is no session any more.
        if parents.filter(|parent| !own.contains(parent)).count() > 1 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the parent of a process; `None` if the process has ended.
fn parent_of(pid: u32) -> Option<u32> {
    parse_parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses the parent in the text of a `/proc/PID/stat` (proc_pid_stat(5)): the second field behind the name, which is
/// in brackets and may contain anything.
fn parse_parent(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

/// Opens the network namespace of the first of these processes that still runs. `None` if none can be opened.
pub(crate) fn open_namespace_of(pids: &[u32]) -> Option<NetworkNamespace> {
    try_open_namespace_of(pids).ok().flatten()
}

/// Opens the network namespace of the first of these processes that still runs. `None` if all have ended.
///
/// Returns an error if none can be opened, but one may still run, as without a free file descriptor.
pub(crate) fn try_open_namespace_of(
    pids: &[u32],
) -> Result<Option<NetworkNamespace>, NamespaceError> {
    let mut failure = None;
    for &pid in pids {
        match NetworkNamespace::open(namespace_path(pid)) {
            Ok(namespace) => return Ok(Some(namespace)),
            Err(error) if error.is_process_ended() => {}
            Err(error) => failure = Some(error),
        }
    }
    failure.map_or(Ok(None), Err)
}

/// Returns the path of a process's network namespace.
pub(crate) fn namespace_path(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/net"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Process id that no process has.
    const ENDED: u32 = u32::MAX;

    /// Plain files stand in for a cgroup.
    fn cgroup(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("rouse-procs-{name}-{}", std::process::id()));
        fs::create_dir_all(dir.join("child")).expect("a folder");
        dir
    }

    #[test]
    fn a_cgroup_has_the_processes_below_it_and_one_that_is_gone_has_none() {
        let dir = cgroup("below");
        fs::write(dir.join("cgroup.procs"), "0\n7\n").expect("a file");
        fs::write(dir.join("child/cgroup.procs"), "5\n").expect("a file");
        assert_eq!(processes(&dir).expect("readable"), [7, 5]);
        fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(processes(&dir).expect("gone"), [0; 0]);
    }

    #[test]
    fn a_cgroup_that_cannot_be_read_is_not_taken_for_an_empty_one() {
        let dir = cgroup("unreadable");
        // No process id can be read from a folder.
        fs::create_dir(dir.join("child/cgroup.procs")).expect("a folder");
        assert!(processes(&dir).is_err());
        assert!(processes_by_namespace(&dir).is_err());
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn a_parent_is_read_behind_any_name() {
        assert_eq!(parse_parent("7 (sh) S 5 7 7 0 -1"), Some(5));
        assert_eq!(parse_parent("7 (a) R 9 (b)) S 5 7 7 0 -1"), Some(5));
        assert_eq!(parse_parent("7 (sh"), None);
    }

    #[test]
    fn a_second_process_that_was_started_from_outside_is_a_session() {
        let dir = cgroup("sessions");
        // This process stands in for a container's first one, and its children for sessions and for its own processes.
        let start = || {
            let sleep = std::process::Command::new("sleep").arg("60").spawn();
            sleep.expect("it starts")
        };
        let (own, mut children) = (std::process::id(), [start(), start()]);
        let [one, other] = [0, 1].map(|at| children[at].id());
        let write = |pids: &[u32]| {
            let lines: String = pids.iter().map(|pid| format!("{pid}\n")).collect();
            fs::write(dir.join("child/cgroup.procs"), lines).expect("a file");
        };
        fs::write(dir.join("cgroup.procs"), "").expect("a file");
        for (pids, expected) in [
            (vec![own, one, other], false),
            (vec![one], false),
            (vec![one, ENDED], false),
            (vec![one, other], true),
        ] {
            write(&pids);
            assert_eq!(has_sessions(&dir).expect("readable"), expected, "{pids:?}");
        }
        // Each container has a first process of its own.
        fs::create_dir(dir.join("sidecar")).expect("a folder");
        fs::write(dir.join("sidecar/cgroup.procs"), format!("{other}\n")).expect("a file");
        write(&[one]);
        assert!(!has_sessions(&dir).expect("readable"));
        for child in &mut children {
            child.kill().expect("it runs");
            child.wait().expect("it ends");
        }
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn a_namespace_is_opened_although_one_of_its_processes_has_ended() {
        let dir = cgroup("namespaces");
        let own = std::process::id();
        fs::write(dir.join("cgroup.procs"), format!("{ENDED}\n{own}\n")).expect("a file");
        let inode = namespace::inode(&namespace_path(own)).expect("it runs");
        let found = processes_by_namespace(&dir).expect("readable");
        assert_eq!(found, BTreeMap::from([(inode, vec![own])]));
        assert!(open_namespace_of(&[ENDED, own]).is_some());
        assert!(open_namespace_of(&[ENDED]).is_none());
        assert!(matches!(try_open_namespace_of(&[ENDED]), Ok(None)));
        fs::remove_dir_all(&dir).expect("removed");
    }
}
