//! Shell: processes of the runtime whose exit codes the node reads itself.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use nix::unistd::Pid;

/// Runtime processes that run now, by pid. Each has a thread or task that reaps it, so `reap_helpers` must not.
#[derive(Clone, Debug, Default)]
pub(super) struct RuntimeProcesses(Arc<Mutex<BTreeSet<i32>>>);

impl RuntimeProcesses {
    /// Starts a process under the lock, so that its pid is listed before `contains` can be asked about it.
    pub(super) fn start<E>(
        &self,
        start: impl FnOnce() -> Result<(Pid, OwnedFd), E>,
    ) -> Result<RuntimeProcess, E> {
        let mut pids = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (pid, pidfd) = start()?;
        pids.insert(pid.as_raw());
        drop(pids);
        Ok(RuntimeProcess { pid: pid.as_raw(), pidfd: Arc::new(pidfd), all: self.clone() })
    }

    /// Returns true if `pid` is such a process.
    pub(super) fn contains(&self, pid: i32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&pid)
    }
}

/// A runtime process. Drop it once it is reaped; otherwise `reap_helpers` reaps it.
#[derive(Debug)]
pub(super) struct RuntimeProcess {
    pub(super) pid: i32,
    pidfd: Arc<OwnedFd>,
    all: RuntimeProcesses,
}

impl RuntimeProcess {
    /// Returns the pidfd of the process.
    pub(super) fn pidfd(&self) -> &Arc<OwnedFd> {
        &self.pidfd
    }
}

impl AsFd for RuntimeProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for RuntimeProcess {
    fn drop(&mut self) {
        self.all.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.pid);
    }
}
