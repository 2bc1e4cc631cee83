//! Shell: learns that a container ended, and how. Nothing polls: a pidfd becomes readable.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use tokio::sync::mpsc;

use super::{Extra, Report, Shared, logs, open_process};
use crate::pods::{Event, Exit};
use crate::sys;

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
    match waitid(Id::PIDFd(fd.as_fd()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
        Ok(WaitStatus::Exited(_, code)) => Some(code),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(128 + signal as i32),
        _ => sys::pidfd_exit_code(fd.as_fd()),
    }
}
