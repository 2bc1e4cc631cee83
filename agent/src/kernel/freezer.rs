//! Shell: freezer of pods' cgroups (cgroup v2, Linux 5.2): freezes and thaws pods, and reads what a frozen pod holds.
//!
//! A pod is frozen at its own cgroup, above those of its containers. A container runtime reads only the freezer of a
//! container's cgroup, which shows that the container runs. SIGKILL ends frozen processes, and all other signals wait
//! for the thaw.

use std::{
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use common::link::error_chain;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::kernel::cgroup_search::{none_if_removed, pod_directories, try_subdirectories};

/// File of a cgroup by which it is frozen (`1`) and thawed (`0`), with all cgroups below it. It has the last request,
/// and not the state.
const FREEZE_FILE: &str = "cgroup.freeze";
/// Time after which a freeze has failed. A process may be in a system call that nothing interrupts, such as one that
/// waits for a disk. On a busy node each process must get a processor before it freezes, which takes seconds. The state
/// machine of standby waits a second longer, so that the failure is reported with its reason.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(19);
/// Period in which the state of a pod is read while its freeze is under way.
const FREEZE_POLL_PERIOD: Duration = Duration::from_millis(1);
/// Bytes that are reclaimed in one call. A call does not end early, so this bounds what the kernel still reclaims from
/// a pod that was thawed in the meantime.
const RECLAIM_STEP_BYTES: u64 = 16 << 20;

/// State of a cgroup, as its file `cgroup.events` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupState {
    /// True if a process is in the cgroup or below it.
    pub is_populated: bool,
    /// True if every process there is frozen.
    pub is_frozen: bool,
}

/// Requests that all processes of a pod freeze. The kernel freezes each process later; see [`wait_until_frozen`].
pub fn freeze(pod: &Path) -> io::Result<()> {
    write_value(&pod.join(FREEZE_FILE), "1")
}

/// Thaws all processes of a pod, which run when this returns. A pod without a cgroup needs no thaw.
pub fn thaw(pod: &Path) -> io::Result<()> {
    none_if_removed(write_value(&pod.join(FREEZE_FILE), "0")).map(drop)
}

/// Waits until all processes of a pod are frozen. Returns the reason for a failure, for users.
pub async fn wait_until_frozen(pod: &Path) -> Result<(), String> {
    let deadline = Instant::now() + FREEZE_TIMEOUT;
    loop {
        // Before the deadline is checked: a pod that froze during the last sleep is no failure.
        match read_state(pod) {
            Ok(Some(state)) if state.is_frozen => return Ok(()),
            Ok(Some(_)) => {}
            Ok(None) => return Err("its cgroup is gone".to_owned()),
            Err(error) => return Err(format!("cannot read its cgroup: {error}")),
        }
        if Instant::now() >= deadline {
            let limit = FREEZE_TIMEOUT.as_secs();
            return Err(format!("a process of it did not freeze within {limit} s"));
        }
        sleep(FREEZE_POLL_PERIOD).await;
    }
}

/// Returns the state of a pod's cgroup; `None` if the cgroup is gone.
pub fn read_state(pod: &Path) -> io::Result<Option<CgroupState>> {
    let text = none_if_removed(fs::read_to_string(pod.join("cgroup.events")))?;
    Ok(text.map(|text| parse_state(&text)))
}

/// Parses the text of a `cgroup.events`.
fn parse_state(text: &str) -> CgroupState {
    let is_set = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.split_once(' '));
        values.any(|(key, value)| key == name && value == "1")
    };
    CgroupState { is_populated: is_set("populated"), is_frozen: is_set("frozen") }
}

/// Finds the pods below `root` that were requested to freeze, also those whose freeze is still under way. A pod of which
/// this cannot be read is one of them: in doubt, a pod runs.
fn find_requested_freezes(root: &Path) -> Vec<PathBuf> {
    let is_requested = |pod: &PathBuf| match none_if_removed(fs::read(pod.join(FREEZE_FILE))) {
        Ok(Some(requested)) => requested.trim_ascii() == b"1",
        Ok(None) => false,
        Err(error) => {
            warn!(cgroup = %pod.display(), %error, "cannot read if a pod is frozen");
            true
        }
    };
    pod_directories(root).into_iter().filter(is_requested).collect()
}

/// Thaws every frozen pod below `root`: an agent that starts or ends does so. Returns the number of frozen pods, those
/// included that could not be thawed.
pub fn thaw_all(root: &Path) -> usize {
    let frozen = find_requested_freezes(root);
    for pod in &frozen {
        match thaw(pod) {
            Ok(()) => info!(cgroup = %pod.display(), "pod thawed: no running agent would thaw it"),
            Err(error) => {
                let error = error_chain(&error);
                warn!(cgroup = %pod.display(), error, "cannot thaw pod");
            }
        }
    }
    frozen.len()
}

/// Returns the number of threads of a pod; 0 if its cgroup is gone. Without the pids controller, which counts threads,
/// it is the number of processes.
pub fn thread_count(pod: &Path) -> io::Result<u64> {
    match none_if_removed(fs::read_to_string(pod.join("pids.current")))? {
        Some(count) => count.trim().parse().map_err(io::Error::other),
        None => count_processes(pod),
    }
}

/// Returns the number of processes in a cgroup and below.
fn count_processes(cgroup: &Path) -> io::Result<u64> {
    let text = none_if_removed(fs::read_to_string(cgroup.join("cgroup.procs")))?;
    let mut count = text.map_or(0, |text| text.lines().count() as u64);
    for child in try_subdirectories(cgroup)? {
        count += count_processes(&child)?;
    }
    Ok(count)
}

/// Returns the memory that a pod holds, in bytes, its file cache included. `None` without the memory controller of
/// cgroup v2.
pub fn memory_bytes(pod: &Path) -> Option<u64> {
    fs::read_to_string(pod.join("memory.current")).ok()?.trim().parse().ok()
}

/// Reclaims the memory of a frozen pod, until the kernel finds no more or `is_cancelled` is set. Blocks for up to
/// seconds. Returns the error `Unsupported` before Linux 5.19, and without the memory controller of cgroup v2.
pub fn reclaim_memory(pod: &Path, is_cancelled: &AtomicBool) -> io::Result<()> {
    let file = pod.join("memory.reclaim");
    if !file.exists() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    while !is_cancelled.load(Ordering::Acquire) {
        let Some(held) = memory_bytes(pod).filter(|held| *held > 0) else { return Ok(()) };
        match write_value(&file, &held.min(RECLAIM_STEP_BYTES).to_string()) {
            Ok(()) => {}
            // The kernel has reclaimed less than that, so it finds no more.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            other => return none_if_removed(other).map(drop),
        }
    }
    Ok(())
}

/// Writes a value to an existing file of a cgroup, in one call as the kernel requires.
fn write_value(file: &Path, value: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(file)?.write_all(value.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain folders and files stand in for cgroups.
    fn root(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("rouse-freeze-{name}-{}", std::process::id()));
        fs::create_dir_all(&root).expect("a folder");
        root
    }

    fn add_pod(root: &Path, path: &str, requested: &str) -> PathBuf {
        let pod = root.join(path);
        fs::create_dir_all(pod.join("main")).expect("a folder");
        fs::write(pod.join(FREEZE_FILE), format!("{requested}\n")).expect("a file");
        pod
    }

    #[test]
    fn the_state_of_a_cgroup_is_read_by_name() {
        let both = CgroupState { is_populated: true, is_frozen: true };
        assert_eq!(parse_state("populated 1\nfrozen 1\n"), both);
        assert_eq!(
            parse_state("frozen 0\npopulated 1\n"),
            CgroupState { is_frozen: false, ..both }
        );
        assert_eq!(parse_state("populated 0\n"), CgroupState::default(), "before Linux 5.2");
    }

    #[test]
    fn all_frozen_pods_below_a_root_are_thawed_and_nothing_else_is_written() {
        let root = root("all");
        let frozen = ["kubepods-pod1.slice", "burstable/pod2", "podthree"];
        let frozen = frozen.map(|path| add_pod(&root, path, "1"));
        let running = add_pod(&root, "podfour", "0");
        // A container that its runtime has paused, and a cgroup that is no pod's.
        let container = add_pod(&root, "podfour/paused", "1");
        let foreign = add_pod(&root, "system.slice", "1");
        let mut found = find_requested_freezes(&root);
        found.sort();
        let mut wanted = frozen.to_vec();
        wanted.sort();
        assert_eq!(found, wanted);
        assert_eq!(thaw_all(&root), 3);
        assert_eq!(thaw_all(&root), 0);
        let requested = |pod: &PathBuf| fs::read_to_string(pod.join(FREEZE_FILE)).expect("a file");
        // The kernel would replace the whole value.
        assert!(frozen.iter().all(|pod| requested(pod).starts_with('0')));
        assert!(requested(&running).starts_with('0'));
        assert!([container, foreign].iter().all(|pod| requested(pod).starts_with('1')));
        fs::remove_dir_all(root).expect("removed");
    }

    #[test]
    fn a_pod_whose_last_request_cannot_be_read_is_thawed_too() {
        let root = root("unread");
        // No request can be read from a folder.
        let unread = root.join("podunread");
        fs::create_dir_all(unread.join(FREEZE_FILE)).expect("a folder");
        // The kernel has no freezer, or the pod has just gone.
        fs::create_dir_all(root.join("podwithout")).expect("a folder");
        assert_eq!(find_requested_freezes(&root), [unread]);
        fs::remove_dir_all(root).expect("removed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_does_not_freeze_in_time_is_a_failure_with_a_reason() {
        let root = root("late");
        let pod = add_pod(&root, "podlate", "0");
        fs::write(pod.join("cgroup.events"), "populated 1\nfrozen 0\n").expect("a file");
        freeze(&pod).expect("written");
        let reason = wait_until_frozen(&pod).await.expect_err("it never freezes");
        assert_eq!(reason, "a process of it did not freeze within 19 s");
        fs::write(pod.join("cgroup.events"), "populated 1\nfrozen 1\n").expect("a file");
        assert_eq!(wait_until_frozen(&pod).await, Ok(()));
        fs::remove_dir_all(&root).expect("removed");
        assert_eq!(wait_until_frozen(&pod).await, Err("its cgroup is gone".to_owned()));
        thaw(&pod).expect("nothing is left to thaw");
        assert_eq!(freeze(&pod).expect_err("gone").kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn threads_are_counted_by_the_kernel_or_else_the_processes() {
        let root = root("threads");
        let pod = add_pod(&root, "podthreads", "0");
        fs::write(pod.join("cgroup.procs"), "").expect("a file");
        fs::write(pod.join("main/cgroup.procs"), "7\n8\n").expect("a file");
        assert_eq!(thread_count(&pod).expect("readable"), 2);
        fs::write(pod.join("pids.current"), "9\n").expect("a file");
        assert_eq!(thread_count(&pod).expect("readable"), 9);
        fs::write(pod.join("pids.current"), "many\n").expect("a file");
        assert!(thread_count(&pod).is_err(), "not known is not none");
        fs::remove_dir_all(&root).expect("removed");
        assert_eq!(thread_count(&pod).expect("gone"), 0);
    }

    #[test]
    fn memory_is_known_where_the_node_counts_it_and_reclaimed_where_it_can() {
        let root = root("memory");
        let pod = add_pod(&root, "podmemory", "1");
        let cancelled = AtomicBool::new(true);
        assert_eq!(memory_bytes(&pod), None);
        let refused = reclaim_memory(&pod, &cancelled).expect_err("no such file");
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        fs::write(pod.join("memory.current"), "4096\n").expect("a file");
        fs::write(pod.join("memory.reclaim"), "").expect("a file");
        assert_eq!(memory_bytes(&pod), Some(4096));
        reclaim_memory(&pod, &cancelled).expect("cancelled before its first step");
        assert_eq!(fs::read_to_string(pod.join("memory.reclaim")).expect("a file"), "");
        fs::remove_dir_all(root).expect("removed");
    }
}
