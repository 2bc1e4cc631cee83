//! Shell: detects a container's exit and its exit code. Nothing polls: a pidfd becomes readable.

use std::fs;
use std::future::pending;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tracing::warn;

use super::{EventResource, KubeletResources, PodEventReport, logs, open_process};
use crate::cgroups::is_in_node;
use crate::layout::NodeLayout;
use crate::pods::{ContainerExit, PodEvent};
use crate::process::{child_pids, exit_code};
use crate::sys;

/// Pauses, in milliseconds, before asking again for the exit code of a process that is still the runtime's child.
const REPARENT_RETRY_MS: [u64; 8] = [1, 2, 5, 10, 20, 50, 100, 200];

/// Opens the process of a container that an earlier node process started, if it still runs in the container's cgroup.
pub(super) fn find_process(
    resources: &KubeletResources,
    uid: &str,
    container: &str,
) -> Option<OwnedFd> {
    let file = resources.layout.bundle(uid, container).join("pid");
    let pid: i32 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    let fd = open_process(pid)?;
    // A process that got this pid later is not in this cgroup.
    let path = resources.layout.container_cgroup(&resources.cgroups.v2, uid, container);
    let procs = fs::read_to_string(path.join("cgroup.procs")).ok()?;
    procs.lines().any(|line| line == pid.to_string()).then_some(fd)
}

/// Returns true if the runtime wrote a container's pid, and no process of the node has handled the exit since.
pub(super) fn has_pid_file(resources: &KubeletResources, uid: &str, container: &str) -> bool {
    resources.layout.bundle(uid, container).join("pid").exists()
}

/// Signals that a child of this process has ended.
#[derive(Debug)]
pub(super) struct ChildSignals(Option<Signal>);

impl ChildSignals {
    /// Starts to listen. Without signals, the regular maintenance finds ended children.
    pub(super) fn new() -> Self {
        let signals = signal(SignalKind::child());
        Self(signals.inspect_err(|error| warn!(%error, "cannot listen for ended children")).ok())
    }

    /// Waits for a signal. Several children that end at once may send one.
    pub(super) async fn next(&mut self) {
        let Some(signals) = &mut self.0 else { return pending().await };
        if signals.recv().await.is_none() {
            self.0 = None;
        }
    }
}

/// Reaps processes that the runtime left between itself and the container's process.
///
/// crun starts one helper that ends at once, and whose parent this process becomes. A command that it could not
/// execute is left too, and so are processes of runc if their container ends while it starts a command. The kernel ends
/// a container's pid namespace only once all of its processes are reaped, so a container would not end either.
///
/// Only children in the node's cgroup are reaped, except two kinds, whose exit codes belong to the task that waits for
/// them: the runtime's own processes, and containers' processes, which are the first in their pid namespaces.
pub(super) fn reap_helpers(resources: &KubeletResources) {
    let layout = &resources.layout;
    for pid in child_pids(Pid::this().as_raw()) {
        let child = || Id::Pid(Pid::from_raw(pid));
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
        // Nearly all children are running containers, which should not cost two files each. A helper that still runs
        // is found by the next round.
        let runs =
            matches!(waitid(child(), flags | WaitPidFlag::WNOWAIT), Ok(WaitStatus::StillAlive));
        if !runs && !resources.runtime.is_runtime_process(pid) && is_helper(pid, layout) {
            let _ = waitid(child(), flags);
        }
    }
}

/// Returns true for a process in a cgroup of the node that is not the first in its pid namespace.
fn is_helper(pid: i32, layout: &NodeLayout) -> bool {
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let is_first = |pids: &str| pids.split_whitespace().skip(1).last() == Some("1");
    is_in_node(&cgroup, layout) && pids.is_some_and(|pids| !is_first(pids))
}

/// Waits for a container's exit and reports it with code, reason and message.
///
/// `fd` is `None` if the process has already ended; then its code is not known. `id` is the container's ID for the
/// runtime, whose state is then deleted: a later run may have the same ID.
pub(super) async fn report_exit(
    resources: Arc<KubeletResources>,
    reports: mpsc::Sender<PodEventReport>,
    uid: String,
    name: String,
    index: usize,
    fd: Option<Arc<OwnedFd>>,
    id: String,
) {
    let code = match &fd {
        Some(fd) => wait_exit_code(fd).await,
        None => None,
    };
    let code = code.unwrap_or(-1);
    let bundle = resources.layout.bundle(&uid, &name);
    let oom_kills = resources.cgroups.oom_kills(&resources.layout, &uid, &name);
    let reason = exit_reason(code, oom_kills_of_run(&bundle, oom_kills));
    let message = logs::exit_message(&bundle);
    let _ = resources.runtime.delete(id).await;
    // Without this file no later node process takes another process with the same pid for the container. It goes last:
    // while it exists, a later node process deletes the runtime's state.
    let _ = fs::remove_file(bundle.join("pid"));
    let exit = ContainerExit { code, reason: reason.to_owned(), message };
    let _ = reports
        .send(PodEventReport {
            uid,
            event: PodEvent::Exited { index, exit },
            resource: EventResource::None,
        })
        .await;
}

/// Returns the file of a bundle with the number of kills for lack of memory before the present run.
///
/// On a hybrid machine the cgroup that counts them, and its count, outlive each run of the container.
pub(super) fn oom_kills_file(bundle: &Path) -> PathBuf {
    bundle.join("oom-kills")
}

/// Returns the number of kills for lack of memory in the present run, of `all` that the cgroup counts.
fn oom_kills_of_run(bundle: &Path, all: u64) -> u64 {
    // Without the file an earlier version started the container; then every kill counts, as it did there.
    let before = fs::read_to_string(oom_kills_file(bundle)).ok();
    all.saturating_sub(before.and_then(|text| text.parse().ok()).unwrap_or(0))
}

/// Returns Kubernetes' reason for an exit. 137 alone is any SIGKILL; with a counted kill it was the kernel.
fn exit_reason(code: i32, oom_kills: u64) -> &'static str {
    match code {
        137 if oom_kills > 0 => "OOMKilled",
        0 => "Completed",
        _ => "Error",
    }
}

/// Waits for a process; `None` if it was another process's child and the kernel does not report the code.
async fn wait_exit_code(fd: &Arc<OwnedFd>) -> Option<i32> {
    drop(sys::watch_readable(Arc::clone(fd)).ok()?.readable().await.ok()?);
    // A short process may end before its parent, the runtime's helper. Once that has ended too, it is our child.
    for pause in REPARENT_RETRY_MS {
        let code = exit_code(fd);
        if code.is_some() {
            return code;
        }
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
    exit_code(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_of_an_earlier_run_gives_no_later_exit_its_reason() {
        let bundle = std::env::temp_dir().join(format!("rouse-exits-{}", std::process::id()));
        fs::create_dir_all(&bundle).unwrap();
        let reason = |code, all| exit_reason(code, oom_kills_of_run(&bundle, all));
        fs::write(oom_kills_file(&bundle), "1").unwrap();
        assert_eq!(reason(137, 1), "Error");
        assert_eq!(reason(137, 2), "OOMKilled");
        assert_eq!(reason(0, 2), "Completed");
        // An earlier version started this container and recorded nothing.
        fs::remove_dir_all(&bundle).unwrap();
        assert_eq!(reason(137, 1), "OOMKilled");
    }
}
