//! Shell: identities of processes, by which a reused pid is never mistaken for the old process.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::sys;

/// Identity of a process: its pid and the clock tick of its start (field 22 of `/proc/PID/stat`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process number in the host's pid namespace.
    pub pid: i32,
    /// Clock ticks from boot to the process's start.
    pub start_ticks: u64,
}

impl ProcessId {
    /// Returns the identity of the process that has this pid now.
    pub fn from_pid(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command may hold blanks and parentheses, so fields are counted after its last parenthesis.
        let fields = stat.rsplit_once(')')?.1;
        let start_ticks = fields.split_whitespace().nth(19)?.parse().ok()?;
        Some(Self { pid, start_ticks })
    }

    /// Returns the identity of the calling process.
    pub fn current() -> Option<Self> {
        Self::from_pid(Pid::this().as_raw())
    }

    /// Opens a pidfd, if the pid still belongs to this process.
    pub fn open(self) -> Option<OwnedFd> {
        let fd = sys::pidfd_open(Pid::from_raw(self.pid)).ok()?;
        // Opened first, compared second: from here on the descriptor cannot come to mean another process.
        (Self::from_pid(self.pid) == Some(self)).then_some(fd)
    }

    /// Returns true if the process still runs; a zombie does not.
    pub fn is_alive(self) -> bool {
        self.open().is_some_and(|fd| !wait_until_ended(&fd, Duration::ZERO))
    }
}

/// Returns the pids of the children of a process.
pub fn child_pids(pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads
        .map(|thread| fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    let pids = |text: String| -> Vec<i32> {
        text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    };
    children.flat_map(pids).collect()
}

/// Waits up to `limit` for the process of a pidfd to end; returns true if it has.
pub fn wait_until_ended(pidfd: &OwnedFd, limit: Duration) -> bool {
    let started = Instant::now();
    loop {
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        let remaining = limit.saturating_sub(started.elapsed());
        let timeout = PollTimeout::try_from(remaining).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            // A signal that this thread handled says nothing about the process.
            Err(Errno::EINTR) => {}
            result => return result.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Waits for the child of a pidfd to end, and reaps it.
pub fn wait_for_child(pidfd: &OwnedFd) -> nix::Result<WaitStatus> {
    loop {
        match waitid(Id::PIDFd(pidfd.as_fd()), WaitPidFlag::WEXITED) {
            // A signal that this thread handled says nothing about the child.
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}

/// Reaps the process of a pidfd if it has ended, and returns its exit code; 128 + signal after a signal.
///
/// `None` while it runs, and for another process's child if the kernel does not report the code.
pub fn exit_code(pidfd: &OwnedFd) -> Option<i32> {
    match waitid(Id::PIDFd(pidfd.as_fd()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG) {
        Ok(WaitStatus::Exited(_, code)) => Some(code),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(128 + signal as i32),
        _ => sys::pidfd_exit_code(pidfd.as_fd()),
    }
}

/// Records a process in a file, so that `rouse down` can end it.
pub fn record_process(path: &Path, process: ProcessId) -> io::Result<()> {
    fs::write(path, serde_json::to_vec(&process)?)
}

/// Reads the process that a file records.
pub fn recorded_process(path: &Path) -> Option<ProcessId> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;

    use nix::sys::signal::{SigEvent, SigevNotify, Signal};
    use nix::sys::time::TimeSpec;
    use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
    use nix::time::ClockId;
    use nix::unistd::gettid;
    use tokio::signal::unix::{SignalKind, signal};

    use super::*;

    /// Interrupts the calling thread each millisecond, until the timer is dropped.
    fn interrupt_this_thread() -> Timer {
        let thread_id = gettid().as_raw();
        let notify = SigevNotify::SigevThreadId { signal: Signal::SIGUSR2, thread_id, si_value: 0 };
        let mut timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify)).unwrap();
        let each_ms = Expiration::Interval(TimeSpec::from(Duration::from_millis(1)));
        timer.set(each_ms, TimerSetTimeFlags::empty()).unwrap();
        timer
    }

    /// Runs `wait` on a thread that handles signals meanwhile, and then ends the process of the pidfd.
    async fn run_interrupted<T: Send + 'static>(
        wait: impl FnOnce(&OwnedFd) -> T + Send + 'static,
    ) -> T {
        let mut signals = signal(SignalKind::user_defined2()).unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        let pidfd = sys::pidfd_open(pid).unwrap();
        let waiting = thread::spawn(move || {
            let _timer = interrupt_this_thread();
            wait(&pidfd)
        });
        for _ in 0..5 {
            signals.recv().await.unwrap();
        }
        nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
        let result = waiting.join().unwrap();
        // An error means that `wait` has reaped it.
        let _reaped = child.wait();
        result
    }

    #[tokio::test]
    async fn a_process_that_runs_has_not_ended_because_of_a_signal() {
        let ended = run_interrupted(|pidfd| wait_until_ended(pidfd, Duration::from_secs(50)));
        assert!(ended.await);
    }

    #[tokio::test]
    async fn the_status_of_a_child_is_its_own_after_signals() {
        let status = run_interrupted(wait_for_child).await;
        assert!(matches!(status, Ok(WaitStatus::Signaled(_, Signal::SIGKILL, _))), "{status:?}");
    }
}
