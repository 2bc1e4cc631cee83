//! Shell: processes of a cgroup, the network namespaces that they are in, and sessions among them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use super::namespace::{self, NamespaceError, NetworkNamespace, is_process_ended};
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

/// Processes of a cgroup by their network namespaces.
#[derive(Debug, Default)]
pub(crate) struct ProcessesByNamespace {
    /// Processes by the inode of their namespace, in ascending order.
    pub(crate) known: BTreeMap<u64, Vec<u32>>,
    /// Processes whose namespace cannot be read, with the reason. They may be in any namespace.
    pub(crate) unknown: BTreeMap<u32, NamespaceError>,
}

impl ProcessesByNamespace {
    /// Sorts processes by the inodes of their namespaces. Those that have ended are left out.
    fn sort(pids: Vec<u32>, inode_of: impl Fn(&Path) -> io::Result<u64>) -> Self {
        let mut all = Self::default();
        for pid in pids {
            let path = namespace_path(pid);
            match inode_of(&path) {
                Ok(inode) => all.known.entry(inode).or_default().push(pid),
                Err(error) if is_process_ended(&error) => {}
                Err(source) => {
                    all.unknown.insert(pid, NamespaceError::Open { path, source });
                }
            }
        }
        all.known.values_mut().for_each(|pids| pids.sort_unstable());
        all
    }
}

/// Returns the processes in the cgroup `dir` and below by their network namespaces. Returns an error like
/// [`processes`].
pub(crate) fn processes_by_namespace(dir: &Path) -> io::Result<ProcessesByNamespace> {
    Ok(ProcessesByNamespace::sort(processes(dir)?, namespace::inode))
}

/// Returns true if a pod has sessions, as `kubectl exec` or an exec probe starts them. These are processes that are
/// neither a container's first one nor descendants of it. `pod` is the directory of the pod's cgroup.
///
/// The runtime, which is outside of the pod, starts both first processes and sessions. So a container has one process
/// with a parent outside of the pod, and more if it has sessions. Returns an error like [`processes`], also if a parent
/// is not known.
pub(crate) fn has_sessions(pod: &Path) -> io::Result<bool> {
    let own: BTreeSet<u32> = processes(pod)?.into_iter().collect();
    for container in try_subdirectories(pod)? {
        if container.file_name().is_some_and(is_runtime_monitor) {
            continue;
        }
        let mut from_outside = 0;
        for pid in processes(&container)? {
            // A process that has ended meanwhile has no parent, and is no session any more.
            let parent = parent_in(fs::read(format!("/proc/{pid}/stat")))?;
            from_outside += u32::from(parent.is_some_and(|parent| !own.contains(&parent)));
        }
        if from_outside > 1 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the parent of a process from the bytes of its `/proc/PID/stat`; `None` if the process has ended.
fn parent_in(stat: io::Result<Vec<u8>>) -> io::Result<Option<u32>> {
    match stat {
        // The name may be any bytes.
        Ok(stat) => match parse_parent(&String::from_utf8_lossy(&stat)) {
            Some(parent) => Ok(Some(parent)),
            None => Err(io::ErrorKind::InvalidData.into()),
        },
        Err(error) if is_process_ended(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Parses the parent in the text of a `/proc/PID/stat` (proc_pid_stat(5)): the second field behind the name, which is
/// in brackets and may contain anything.
fn parse_parent(stat: &str) -> Option<u32> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

/// Opens the network namespace of the first of these processes that still runs. `None` if all have ended.
///
/// Returns an error if none can be opened, but one may still run, as without a free file descriptor.
pub(crate) fn open_namespace_of(pids: &[u32]) -> Result<Option<NetworkNamespace>, NamespaceError> {
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
    fn a_process_whose_namespace_cannot_be_read_is_not_taken_for_one_that_has_ended() {
        let inode_of = |path: &Path| match path.to_str() {
            Some("/proc/8/ns/net") => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
            Some("/proc/9/ns/net") => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            _ => Ok(1),
        };
        let all = ProcessesByNamespace::sort(vec![7, 8, 9, 6], inode_of);
        assert_eq!(all.known, BTreeMap::from([(1, vec![6, 7])]));
        assert_eq!(all.unknown.into_keys().collect::<Vec<_>>(), [8]);
    }

    #[test]
    fn a_parent_is_read_behind_any_name() {
        assert_eq!(parse_parent("7 (sh) S 5 7 7 0 -1"), Some(5));
        assert_eq!(parse_parent("7 (a) R 9 (b)) S 5 7 7 0 -1"), Some(5));
        assert_eq!(parse_parent("7 (sh"), None);
    }

    /// A process without a parent is no session, and a pod without sessions may freeze.
    #[test]
    fn a_parent_that_cannot_be_read_is_not_taken_for_none() {
        let failed = |errno| parent_in(Err(io::Error::from_raw_os_error(errno)));
        assert_eq!(parent_in(Ok(b"7 (\xFF) S 5 7".to_vec())).expect("readable"), Some(5));
        assert_eq!(failed(libc::ENOENT).expect("it has ended"), None);
        assert_eq!(failed(libc::ESRCH).expect("it has ended"), None);
        assert!(failed(libc::EMFILE).is_err());
        assert!(parent_in(Ok(b"7 (sh".to_vec())).is_err());
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
        assert_eq!(found.known, BTreeMap::from([(inode, vec![own])]));
        assert!(found.unknown.is_empty(), "{found:?}");
        assert!(matches!(open_namespace_of(&[ENDED, own]), Ok(Some(_))));
        assert!(matches!(open_namespace_of(&[ENDED]), Ok(None)));
        fs::remove_dir_all(&dir).expect("removed");
    }
}
