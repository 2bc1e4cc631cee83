//! Shell: learns that a container ended, and how. Nothing polls: a pidfd becomes readable.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use tokio::sync::mpsc;

use super::{Extra, Report, Shared, logs, open_process};
use crate::pods::{Event, Exit};
use crate::process::exit_code;
use crate::sys;

/// Pauses, in milliseconds, between looks at a process that ended as the child of another: the runtime ends within them.
const HANDED_OVER_MS: [u64; 8] = [1, 2, 5, 10, 20, 50, 100, 200];

/// The process of a container that a predecessor started, if it still runs in the container's cgroup.
pub(super) fn find(shared: &Shared, uid: &str, container: &str) -> Option<OwnedFd> {
    let file = shared.layout.bundle(uid, container).join("pid");
    let pid: i32 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    let fd = open_process(pid)?;
    // A pid used again would not be in this cgroup.
    let path = shared.layout.container_cgroup(&shared.mounts.v2, uid, container);
    let procs = fs::read_to_string(path.join("cgroup.procs")).ok()?;
    procs.lines().any(|line| line == pid.to_string()).then_some(fd)
}

/// Reaps what the runtime left between itself and the container's process: crun starts one helper that ends at once,
/// and whose parent we become. A command that it could not execute is left too, and a container ends only once all of its
/// processes are reaped.
///
/// Only children in a pod's cgroup are meant that are not a container's own process: that one is the first in its pid
/// namespace, and its exit code belongs to the task that waits for it.
pub(super) fn reap_helpers(shared: &Shared) {
    let pods = shared.layout.pods_cgroup(Path::new("/"));
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return };
    for thread in threads.flatten() {
        let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        for pid in children.split_whitespace().filter_map(|pid| pid.parse().ok()) {
            let child = || Id::Pid(nix::unistd::Pid::from_raw(pid));
            let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
            // Nearly all are containers that run, and those are not to cost two files each. A helper that
            // runs still is found by the next round.
            let runs =
                matches!(waitid(child(), look | WaitPidFlag::WNOWAIT), Ok(WaitStatus::StillAlive));
            if !runs && !shared.runtime.executes(pid) && is_helper(pid, &pods) {
                let _ = waitid(child(), look);
            }
        }
    }
}

fn is_helper(pid: i32, pods: &Path) -> bool {
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let own = cgroup.lines().find_map(|line| line.strip_prefix("0::"));
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let is_first = |pids: &str| pids.split_whitespace().skip(1).last() == Some("1");
    own.is_some_and(|own| Path::new(own).starts_with(pods))
        && pids.is_some_and(|pids| !is_first(pids))
}

/// Waits for a container's end and reports it.
pub(super) async fn report(
    shared: Arc<Shared>,
    reports: mpsc::Sender<Report>,
    uid: String,
    name: String,
    at: usize,
    fd: Arc<OwnedFd>,
    id: Option<String>,
) {
    let code = ended(&fd).await.unwrap_or(-1);
    let oom = code == 137 && shared.mounts.oom_kills(&shared.layout, &uid, &name) > 0;
    let reason = match code {
        _ if oom => "OOMKilled",
        0 => "Completed",
        _ => "Error",
    };
    let message = logs::last_words(&shared.layout, &uid, &name);
    // Not found again by a successor, whatever gets this pid next.
    let _ = fs::remove_file(shared.layout.bundle(&uid, &name).join("pid"));
    if let Some(id) = id {
        let _ = shared.runtime.delete(id).await;
    }
    let exit = Exit { code, reason: reason.to_owned(), message };
    let _ =
        reports.send(Report { uid, event: Event::Exited { at, exit }, extra: Extra::None }).await;
}

/// Exit code of a process; `None` when it was somebody else's child and the kernel does not tell.
async fn ended(fd: &Arc<OwnedFd>) -> Option<i32> {
    drop(sys::watch(Arc::clone(fd)).ok()?.readable().await.ok()?);
    // One that ends at once may do so before the runtime's helper, its parent, has: it is ours a moment later.
    for pause in HANDED_OVER_MS {
        let code = exit_code(fd);
        if code.is_some() {
            return code;
        }
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
    exit_code(fd)
}
